"""The engine without threads: it plans and dispatches steps, takes in their results and returns the outputs."""

from __future__ import annotations

import heapq
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np

from batcher import counting
from batcher.buckets import BucketLadder
from batcher.config import EngineConfig, Scheduling
from batcher.delivery import Delivery, StepDelivery, plain_output
from batcher.grammar import GrammarError
from batcher.later_programs import LaterPrograms
from batcher.masks import Answer, Ask
from batcher.multi_step import MultiStepScheduler
from batcher.pack import Packer
from batcher.plan import StepPlan
from batcher.pooling import embedding, take_pooled
from batcher.reading import StepReading
from batcher.request import ErrorCode, FinishReason, RequestOutput
from batcher.scheduler import Scheduler
from batcher.scores import take_prompt_logprobs, token_logprobs
from batcher.sequence import Sequence, State
from batcher.speculation import SpeculativeScheduler, may_have_drafts
from batcher.static import StaticScheduler
from batcher.stats import EngineStats
from batcher.step import Capacity, Runner, StepHandle, StepOutput, Variant
from batcher.step_log import StepLog
from batcher.step_watch import StepWatch

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class InFlight:
    """A dispatched step whose result has not been read."""

    plan: StepPlan
    handle: StepHandle


class EngineCore:
    """Not thread-safe: one thread calls everything here. Only `InFlight.handle.result()` may run elsewhere."""

    def __init__(self, runner: Runner, config: EngineConfig, ladder: BucketLadder, clock: Callable[[], float]) -> None:
        capacity = runner.capacity()
        self.scheduler = _make_scheduler(capacity, config, ladder)
        self.in_flight: deque[InFlight] = deque()  # oldest first
        self.sequences: dict[str, Sequence] = {}  # waiting and running
        self._runner = runner
        self._clock = clock
        self._packer = Packer(capacity, ladder.config.max_num_seqs)
        self._counts = EngineStats(num_pages=capacity.num_pages)
        self._step_log = StepLog()
        self.step_watch = StepWatch(config.step_timeout_s, clock)
        self._deadlines: list[
            tuple[float, int, Sequence]
        ] = []  # a heap; entries of admitted and of ended requests are stale
        self._num_deadlines = 0
        self._num_compiling = 0
        self.asks: list[Ask] = []  # for masks; the engine passes them on and empties the list
        self.num_masks_wanted = 0  # asked for and not taken in yet
        self._depth = config.pipeline_depth
        self._failure: BaseException | None = None  # of a step in flight
        self._lost: list[StepPlan] = []  # failed steps, and those that were in flight behind them
        self._num_compiles_at_start = runner.num_compiles
        self._later_programs = LaterPrograms(ladder, ())

    def warmed_up(self, later: LaterPrograms) -> None:
        """The warm-up has left these programs. Other compilations are counted in `num_compiles_after_warm_up`."""
        self._num_compiles_at_start = self._runner.num_compiles
        self._later_programs = later

    # --- arrivals and departures ---

    def add(self, sequence: Sequence) -> None:
        self.sequences[sequence.request_id] = sequence
        if sequence.matcher is None:
            self.scheduler.add(sequence)
        else:
            self._num_compiling += 1
            self._ask(sequence, ())
        if sequence.request.deadline_s is not None:
            due = sequence.arrived_s + sequence.request.deadline_s
            self._num_deadlines += 1
            heapq.heappush(self._deadlines, (due, self._num_deadlines, sequence))

    def abort(self, sequence: Sequence, reason: FinishReason) -> list[Delivery]:
        """Ends a request in any state. For a request that has ended it does nothing."""
        return [] if sequence.state is State.FINISHED else [self._end(sequence, reason)]

    def next_deadline(self) -> float | None:
        """The earliest deadline of a queued request, by the clock. None if there is none."""
        while self._deadlines and not _still_queued(self._deadlines[0][2]):
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def expire(self) -> list[Delivery]:
        """Ends the queued requests whose deadline has passed."""
        deliveries = []
        while (due := self.next_deadline()) is not None and due <= self._clock():
            _, _, sequence = heapq.heappop(self._deadlines)
            waited = f"the request waited longer than its limit of {sequence.request.deadline_s} s in the queue"
            deliveries.append(self._end(sequence, FinishReason.ERROR, waited, ErrorCode.QUEUE_DEADLINE))
        return deliveries

    def _ask(self, seq: Sequence, tokens: tuple[int, ...]) -> None:
        self.asks.append(Ask(seq, tokens))
        self.num_masks_wanted += 1

    def take_mask(self, answer: Answer) -> list[Delivery]:
        """Takes in the mask of a request's next token."""
        self.num_masks_wanted -= 1
        seq, permit = answer.sequence, answer.permit
        if seq.state is State.FINISHED:
            return []
        if isinstance(permit, GrammarError):
            return [self._end(seq, FinishReason.ERROR, str(permit), ErrorCode.GRAMMAR)]
        if isinstance(permit, Exception):
            _log.error("the mask of request %r could not be computed", seq.request_id, exc_info=permit)
            return [self._end(seq, FinishReason.ERROR, f"its mask could not be computed: {permit}")]
        if permit.is_over:
            return [self._end(seq, FinishReason.STOP)]
        mask = permit.mask if seq.allowed is None else permit.mask & seq.allowed
        if not mask.any():
            nothing = "of the tokens that allowed_token_ids and bad_words leave, the grammar allows none next"
            return [self._end(seq, FinishReason.ERROR, nothing, ErrorCode.GRAMMAR)]
        seq.mask, seq.is_blocked, seq.is_slow_to_mask = mask, False, answer.was_slow
        if seq.state is State.COMPILING:
            seq.is_slow_to_mask = False
            seq.state = State.WAITING
            self._num_compiling -= 1
            self.scheduler.add(seq)
        return []

    # --- steps ---

    def can_dispatch(self) -> bool:
        """Whether the pipeline has room, and no step in flight is known to have failed."""
        return len(self.in_flight) < self._depth and self._failure is None

    def dispatch(self) -> InFlight | None:
        """Plans the next step and gives it to the runner. None: nothing can run now.

        A step that the runner refuses counts as in flight, and its `result()` raises the runner's error.
        """
        plan = self.scheduler.schedule()
        if plan is None:
            return None
        bucket, plan.bucket = plan.bucket, self._later_programs.or_stand_in(plan.bucket)
        self._counts.num_stand_in_steps += plan.bucket != bucket
        counting.count_plan(self._counts, plan, self._clock)
        self._step_log.dispatched(plan, self._clock())
        try:
            handle = self._runner.execute(self._packer.pack(plan))
        except Exception as error:
            self._failure = error
            handle = _Refused(error)
        self.in_flight.append(InFlight(plan, handle))
        self.step_watch.dispatched()
        return self.in_flight[-1]

    def complete(self, output: StepOutput) -> StepDelivery:
        """Takes in the result of the oldest step in flight."""
        plan = self._pop_oldest()
        if self._lost:  # an earlier step failed, so this one's result cannot be trusted
            return StepDelivery(self._lose(plan))
        if plan.bucket.variant.scores:
            take_prompt_logprobs(plan, output)
        if plan.bucket.variant is Variant.EMBED:
            take_pooled(plan, output)
        reading = StepReading(output, self._clock())
        if plan.bucket.num_drafts:
            self._read_drafts(plan, reading)
        elif plan.bucket.num_steps > 1:
            self._read_steps(plan, reading)
        else:
            self._read_tokens(plan, reading)
        self.scheduler.commit_some()
        return reading.delivery()

    def fail(self, error: BaseException) -> list[Delivery]:
        """The oldest step in flight failed. Its requests and those of the steps behind it end with the error.

        They end when the last of these steps has returned. Then the runner recovers, and all other running requests
        are recomputed. Raises the runner's error if it cannot recover.
        """
        plan = self._pop_oldest()
        self._failure = self._failure or error
        return self._lose(plan)

    def _pop_oldest(self) -> StepPlan:
        plan = self.in_flight.popleft().plan
        self.scheduler.step_returned(plan.number)
        ran_s = self.step_watch.returned(len(self.in_flight))
        if isinstance(self.scheduler, MultiStepScheduler):
            self.scheduler.took(plan, ran_s)
        return plan

    def end_all(self, reason: FinishReason, error: str | None = None, code: ErrorCode | None = None) -> list[Delivery]:
        """Ends all requests."""
        return [self._end(seq, reason, error, code) for seq in list(self.sequences.values())]

    def stats(self) -> EngineStats:
        """A copy of all counts, with the gauges of this moment."""
        scheduler, counts = self.scheduler, self._counts
        counts.num_requests_running = len(scheduler.running)
        counts.num_requests_waiting = len(scheduler.waiting) + self._num_compiling
        counts.num_pages_used = scheduler.pool.num_used
        counts.num_pages_reusable = scheduler.pool.num_reusable
        counts.num_preemptions = scheduler.num_preemptions
        counts.prefix_cache_queries = scheduler.prefix_queries
        counts.prefix_cache_hits = scheduler.prefix_hits
        counts.num_programs_to_come = len(self._later_programs)
        counts.num_compiles_after_warm_up = self._runner.num_compiles - self._num_compiles_at_start
        counts.recent_steps = self._step_log.recent()
        return counts.copy()

    def check_integrity(self) -> None:
        """For an idle engine, which must hold nothing. An inconsistency is logged and counted; serving goes on."""
        scheduler = self.scheduler
        try:
            scheduler.check_integrity()
            assert scheduler.pool.num_used == 0, f"{scheduler.pool.num_used} pages are in use"
            assert not self.in_flight and not self.sequences, "requests or steps are left"
        except AssertionError as error:
            self._counts.integrity_failures += 1
            _log.error("the idle engine is inconsistent: %s", error)

    # --- within a step ---

    def _read_tokens(self, plan: StepPlan, reading: StepReading) -> None:
        """Reads a step without drafts. Its rows are decodes, then chunks."""
        output = reading.output
        num_decodes = len(plan.rows) - len(plan.chunks)
        if plan.looks_up and output.foretold is not None:  # a program that stands in for the step's own may not look up
            assert isinstance(self.scheduler, SpeculativeScheduler)
            for seq, hit in zip(plan.rows, output.foretold.tolist(), strict=False):
                self.scheduler.learn(seq, int(hit), 1)
        for row in self._read_columns(plan, num_decodes, reading):
            self._look_at(plan.rows[row], (int(output.tokens[row, 0]),), row, reading)
        for row in range(num_decodes, len(plan.rows)):
            if plan.emits[row]:
                self._look_at(plan.rows[row], (int(output.tokens[row, 0]),), row, reading)

    def _read_columns(self, plan: StepPlan, num_decodes: int, reading: StepReading) -> list[int]:
        """Reads the first rows, which are decodes, by columns. Returns those that need a look of their own."""
        columns = self.scheduler.columns
        slots, rows = plan.slots[:num_decodes], plan.rows
        drawn = reading.output.tokens[:num_decodes, 0]
        left = columns.left[slots] - 1
        looks = left <= 0
        looks |= columns.num_ended_by.take(drawn, mode="clip") > 0  # what is not finite may draw anything
        looks |= ~reading.output.finite[:num_decodes]
        to_look_at: list[int] = np.flatnonzero(looks).tolist()
        if to_look_at:
            plain = ~looks
            slots, drawn, left, rows = slots[plain], drawn[plain], left[plain], list(compress(rows, plain.tolist()))
        elif num_decodes < len(rows):
            rows = rows[:num_decodes]
        if not rows:
            return to_look_at
        for seq, token in zip(rows, drawn.tolist(), strict=True):
            seq.output.append(token)
        columns.left[slots] = left
        counting.count_gaps(self._counts, reading.now - columns.last_token_s[slots])
        columns.last_token_s[slots] = reading.now
        left_of_page = columns.left_of_page[slots] - 1
        columns.left_of_page[slots] = left_of_page
        for row in np.flatnonzero(left_of_page <= 0).tolist():
            self.scheduler.commit_soon(rows[row])
        self._counts.generation_tokens += len(rows)
        reading.rows, reading.numbers, reading.tokens = rows, columns.numbers[slots], drawn
        return to_look_at

    def _read_drafts(self, plan: StepPlan, reading: StepReading) -> None:
        """Reads a step with drafts: how many were accepted, and each row's tokens up to its request's end."""
        output = reading.output
        assert output.num_drafts is not None and output.num_accepted is not None and output.foretold is not None
        assert isinstance(self.scheduler, SpeculativeScheduler)
        proposed, accepted, foretold = (x.tolist() for x in (output.num_drafts, output.num_accepted, output.foretold))
        tokens: list[list[int]] = output.tokens.tolist()
        for row, (seq, q_len) in enumerate(zip(plan.rows, plan.q_lens, strict=True)):
            drawn = tuple(tokens[row][: 1 + accepted[row]])
            drawn = drawn[: seq.num_to_end(drawn)]
            if seq.state is not State.FINISHED:
                self.scheduler.take_back(seq, q_len - len(drawn))
                if proposed[row] or self.scheduler.foretells:
                    self.scheduler.learn(seq, max(accepted[row], int(foretold[row])), max(q_len - 1, 1))
                self._counts.speculation.observe(proposed[row], accepted[row])
                seq.num_accepted += min(accepted[row], len(drawn))
                seq.num_rejected += proposed[row] - accepted[row]
                self._counts.speculation.num_undrafted_rows += not may_have_drafts(seq)
            self._look_at(seq, drawn, row, reading)

    def _read_steps(self, plan: StepPlan, reading: StepReading) -> None:
        """Reads a program of several steps: each row's tokens up to its request's end."""
        tokens: list[list[int]] = reading.output.tokens.tolist()
        for row, (seq, q_len) in enumerate(zip(plan.rows, plan.q_lens, strict=True)):
            drawn = tuple(tokens[row][:q_len])
            drawn = drawn[: seq.num_to_end(drawn)]
            if seq.state is not State.FINISHED:
                self.scheduler.take_back(seq, q_len - len(drawn))
            self._look_at(seq, drawn, row, reading)

    def _look_at(self, seq: Sequence, tokens: tuple[int, ...], row: int, reading: StepReading) -> None:
        """Takes in the tokens of a row; only the last of them can end its request."""
        if seq.state is State.FINISHED:  # the surplus token of an ended request is dropped
            return
        if not _is_finite(reading.output, row, len(tokens)):
            reading.outputs.append(self._end_not_finite(seq))
            return
        if seq.pooling is not None:
            reading.outputs.append(self._end_embedded(seq))
            return
        columns, now, is_first = self.scheduler.columns, reading.now, seq.first_token_s < 0
        self._counts.generation_tokens += len(tokens)
        if not is_first:
            gap = (now - columns.last_token_of(seq)) / len(tokens)
            self._counts.inter_token_latency.observe(gap, len(tokens))
        seq.output.extend(tokens)
        columns.looked(seq, now)
        output = plain_output(seq, tokens)
        if is_first:
            self._take_first(seq, output, now)
        if seq.sampling.logprobs is not None:
            output.logprobs = token_logprobs(reading.output, row, len(tokens), seq.sampling.logprobs)
        if seq.request.counts_drafts:
            output.drafts = (seq.num_accepted, seq.num_rejected)
        self._end_if_over(seq, output)
        if is_first or output.logprobs or output.drafts or output.finish_reason is not None:
            reading.outputs.append((seq, output))
        else:
            reading.add(seq, tokens)
        if output.finish_reason is None:
            if seq.matcher is not None:
                self._ask(seq, tokens)
            self.scheduler.commit(seq)
            columns.look_at_page(seq)

    def _take_first(self, seq: Sequence, output: RequestOutput, now: float) -> None:
        """A request has its first token."""
        seq.first_token_s = now
        counting.count_first_token(self._counts, seq)
        output.times = (seq.started_s - seq.arrived_s, now - seq.started_s)
        if seq.prompt_logprobs is not None:
            output.prompt_logprobs = tuple(entry for entry in seq.prompt_logprobs if entry is not None)
            assert len(output.prompt_logprobs) == seq.num_prompt - 1, "a prompt position was not scored"

    def _end_if_over(self, seq: Sequence, output: RequestOutput) -> None:
        """Ends the request if its last token ends it."""
        token, count = seq.output[-1], len(seq.output)
        if token in seq.stop_ids and count >= seq.sampling.min_tokens:
            output.finish_reason = FinishReason.STOP
            output.stop_reason = token if token in seq.sampling.stop_token_ids else None
        elif count == seq.limit:
            output.finish_reason = FinishReason.LENGTH
        if output.finish_reason is not None:
            self._forget(seq, output.finish_reason)

    def _end_embedded(self, seq: Sequence) -> Delivery:
        vector = embedding(seq)
        if vector is None:
            return self._end_not_finite(seq)
        seq, output = self._end(seq, FinishReason.STOP)
        output.embedding = vector
        return seq, output

    def _end_not_finite(self, seq: Sequence) -> Delivery:
        self._counts.corrupted_requests += 1
        position = seq.num_prompt + len(seq.output)
        message = f"the model's output for this request is not a finite number, at token {position}"
        delivery = self._end(seq, FinishReason.ERROR, message, ErrorCode.NOT_FINITE)
        # `_end` has added the request's last full pages to the prefix cache, so `forget` must follow it.
        self.scheduler.pool.forget(seq.digests)  # not seq.pages: a request that was preempted in flight has none
        return delivery

    def _end(
        self, seq: Sequence, reason: FinishReason, error: str | None = None, code: ErrorCode | None = None
    ) -> Delivery:
        self._forget(seq, reason)
        return seq, RequestOutput(
            request_id=seq.request_id,
            number=seq.number,
            num_cached_tokens=seq.num_hit_tokens,
            finish_reason=reason,
            error=error,
            error_code=code,
        )

    def _forget(self, seq: Sequence, reason: FinishReason) -> None:
        self._num_compiling -= seq.state is State.COMPILING
        self.scheduler.finish(seq)
        del self.sequences[seq.request_id]
        if reason is not FinishReason.ERROR and seq.output:
            self.scheduler.forecast.finished(seq, stopped=reason is FinishReason.STOP)
        counting.count_end(self._counts, seq, reason)

    # --- failure ---

    def _lose(self, plan: StepPlan) -> list[Delivery]:
        self._lost.append(plan)
        if self.in_flight:
            return []
        self._counts.failed_steps += len(self._lost)
        self._runner.recover()  # raises if the device is lost; the engine then dies
        error, self._failure = self._failure, None
        message = f"a step that computed this request failed: {type(error).__name__}: {error}"
        victims = {seq.request_id: seq for plan in self._lost for seq in plan.rows if seq.state is not State.FINISHED}
        deliveries = [self._end(s, FinishReason.ERROR, message, ErrorCode.STEP_FAILED) for s in victims.values()]
        self._lost.clear()
        self._recompute()
        return deliveries

    def change(self, work: Callable[[], None]) -> None:
        """Runs `work` with no step in flight, and empties the prefix cache. Running requests are recomputed."""
        assert not self.in_flight, "steps are in flight"
        try:
            work()
        finally:
            self._recompute()

    def _recompute(self) -> None:
        """The device has lost pages and slots."""
        self._packer.forget()
        self.scheduler.recover()


def _make_scheduler(capacity: Capacity, config: EngineConfig, ladder: BucketLadder) -> Scheduler:
    options: dict[str, Any] = {"prefix_caching": config.prefix_caching, "step_cost_tokens": config.step_cost_tokens}
    if config.scheduling is Scheduling.STATIC:
        return StaticScheduler(capacity, ladder, **options)  # a baseline, without drafts
    options["long_prompts"] = config.long_prompts
    if ladder.config.num_steps > 1:
        return MultiStepScheduler(capacity, ladder, **options, pipeline_depth=config.pipeline_depth)
    if ladder.config.num_drafts:
        options |= {"weights_cost_tokens": config.weights_cost_tokens, "draft_cost": config.draft_cost}
        return SpeculativeScheduler(capacity, ladder, **options)
    return Scheduler(capacity, ladder, **options)


def _is_finite(output: StepOutput, row: int, num_tokens: int) -> bool:
    """Whether the logits of a row's first tokens were finite."""
    return bool(output.finite[row] if output.finite.ndim == 1 else output.finite[row, :num_tokens].all())


def _still_queued(seq: Sequence) -> bool:
    """Whether the deadline still applies. It does not for a preempted request, which was admitted before."""
    return seq.state in (State.COMPILING, State.WAITING) and seq.started_s < 0


class _Refused:
    """The handle of a step that never started."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def result(self) -> StepOutput:
        raise self._error
