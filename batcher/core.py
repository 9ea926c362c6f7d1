"""The engine without threads: it plans and dispatches steps, takes in their results and returns the outputs."""

from __future__ import annotations

import heapq
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from batcher.buckets import BucketLadder
from batcher.config import EngineConfig, Scheduling
from batcher.grammar import GrammarError
from batcher.masks import Answer, Ask
from batcher.pack import Packer
from batcher.plan import StepPlan
from batcher.pooling import embedding, take_pooled
from batcher.request import ErrorCode, FinishReason, RequestOutput, TokenLogprobs
from batcher.scheduler import Scheduler
from batcher.sequence import Sequence, State
from batcher.speculation import SpeculativeScheduler, may_have_drafts
from batcher.static import StaticScheduler
from batcher.stats import EngineStats
from batcher.step import Capacity, Runner, StepHandle, StepOutput, Variant
from batcher.step_log import StepLog
from batcher.step_watch import StepWatch

_log = logging.getLogger(__name__)

Delivery = tuple[Sequence, RequestOutput]


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

    def warmed_up(self) -> None:
        """Later compilations are counted in `num_compiles_after_warm_up`."""
        self._num_compiles_at_start = self._runner.num_compiles

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
        self._count_plan(plan)
        self._step_log.dispatched(plan, self._clock())
        try:
            handle = self._runner.execute(self._packer.pack(plan))
        except Exception as error:
            self._failure = error
            handle = _Refused(error)
        self.in_flight.append(InFlight(plan, handle))
        self.step_watch.dispatched()
        return self.in_flight[-1]

    def complete(self, output: StepOutput) -> list[Delivery]:
        """Takes in the result of the oldest step in flight."""
        plan = self._pop_oldest()
        if self._lost:  # an earlier step failed, so this one's result cannot be trusted
            return self._lose(plan)
        if plan.bucket.variant.scores:
            self._take_prompt_logprobs(plan, output)
        if plan.bucket.variant is Variant.EMBED:
            take_pooled(plan, output)
        now = self._clock()
        finite = output.finite.tolist()
        tokens: list[tuple[int, ...]] = list(zip(*output.tokens.T.tolist(), strict=True))  # of each row
        if plan.bucket.num_drafts:
            tokens = self._settle(plan, output, tokens)
        elif output.foretold is not None and isinstance(self.scheduler, SpeculativeScheduler) and not plan.chunks:
            for seq, hit in zip(plan.rows, output.foretold.tolist(), strict=False):
                self.scheduler.learn(seq, int(hit), 1)
        gaps: dict[float, int] = {}  # time of the token before -> rows with one token
        deliveries: list[Delivery] = []
        num_tokens = 0
        padded = zip(plan.rows, plan.emits, tokens, strict=False)
        for row, (seq, emits, drawn) in enumerate(padded):
            if not emits or seq.state is State.FINISHED:  # the surplus token of an ended request is dropped
                continue
            if not finite[row]:
                deliveries.append(self._end_not_finite(seq))
                continue
            if seq.pooling is not None:
                deliveries.append(self._end_embedded(seq))
                continue
            count = len(drawn)
            num_tokens += count
            if seq.first_token_s >= 0:
                last = seq.last_token_s
                if count == 1:
                    gaps[last] = gaps.get(last, 0) + 1
                else:
                    self._counts.inter_token_latency.observe((now - last) / count, count)
            deliveries.append((seq, self._take_tokens(seq, drawn, now, output, row)))
        self._counts.generation_tokens += num_tokens
        for last, times in gaps.items():
            self._counts.inter_token_latency.observe(now - last, times)
        return deliveries

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
        self.step_watch.returned(len(self.in_flight))
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

    def _settle(self, plan: StepPlan, output: StepOutput, tokens: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Takes in how many drafts were accepted. Returns each row's tokens, up to its request's end."""
        assert output.num_drafts is not None and output.num_accepted is not None and output.foretold is not None
        assert isinstance(self.scheduler, SpeculativeScheduler)
        proposed, accepted, foretold = (x.tolist() for x in (output.num_drafts, output.num_accepted, output.foretold))
        settled = []
        for row, (seq, q_len) in enumerate(zip(plan.rows, plan.q_lens, strict=True)):
            drawn = tokens[row][: 1 + accepted[row]]
            settled.append(drawn[: _num_to_end(seq, drawn)])
            if seq.state is not State.FINISHED:
                self.scheduler.take_back(seq, q_len - len(drawn))
                self.scheduler.learn(seq, max(accepted[row], int(foretold[row])), max(q_len - 1, 1))
                self._counts.speculation.observe(proposed[row], accepted[row])
                self._counts.speculation.num_undrafted_rows += not may_have_drafts(seq)
        return settled

    def _take_tokens(
        self, seq: Sequence, tokens: tuple[int, ...], now: float, step: StepOutput, row: int
    ) -> RequestOutput:
        """Takes in the tokens of a row; only the last of them can end its request. This runs for every row, so work
        that few rows need is behind conditions."""
        output = RequestOutput(request_id=seq.request_id, token_ids=tokens, num_cached_tokens=seq.num_hit_tokens)
        seq.output.extend(tokens)
        seq.last_token_s = now
        if seq.sampling.logprobs is not None:
            output.logprobs = _logprobs(step, row, len(tokens), seq.sampling.logprobs)
        if seq.first_token_s < 0:
            seq.first_token_s = now
            self._counts.time_to_first_token.observe(now - seq.arrived_s)
            self._counts.prefill_time.observe(now - seq.started_s)
            output.times = (seq.started_s - seq.arrived_s, now - seq.started_s)
            if seq.prompt_logprobs is not None:
                output.prompt_logprobs = tuple(entry for entry in seq.prompt_logprobs if entry is not None)
                assert len(output.prompt_logprobs) == seq.num_prompt - 1, "a prompt position was not scored"
        token, count = tokens[-1], len(seq.output)
        if token in seq.stop_ids and count >= seq.sampling.min_tokens:
            output.finish_reason = FinishReason.STOP
            output.stop_reason = token if token in seq.sampling.stop_token_ids else None
        elif count == seq.limit:
            output.finish_reason = FinishReason.LENGTH
        if output.finish_reason is not None:
            self._forget(seq, output.finish_reason)
            return output
        if seq.matcher is not None:
            self._ask(seq, tokens)
        if seq.num_computed >= seq.commit_at:
            self.scheduler.commit(seq)
        return output

    def _take_prompt_logprobs(self, plan: StepPlan, output: StepOutput) -> None:
        for chunk in plan.chunks:
            seq = plan.rows[chunk.row]
            wanted = seq.sampling.prompt_logprobs
            if wanted is None or seq.prompt_logprobs is None or seq.first_token_s >= 0:
                continue
            count = min(chunk.count, seq.num_prompt - 1 - chunk.start)  # the last prompt token has no target
            for i in range(count):
                seq.prompt_logprobs[chunk.start + i] = _target_logprobs(output, chunk.offset + i, wanted)

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
            num_cached_tokens=seq.num_hit_tokens,
            finish_reason=reason,
            error=error,
            error_code=code,
        )

    def _forget(self, seq: Sequence, reason: FinishReason) -> None:
        self._num_compiling -= seq.state is State.COMPILING
        self.scheduler.finish(seq)
        del self.sequences[seq.request_id]
        self._count_end(seq, reason)

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
        self._packer.forget()
        self.scheduler.recover()
        return deliveries

    # --- counting ---

    def _count_plan(self, plan: StepPlan) -> None:
        counts = self._counts
        counts.num_steps += 1
        counts.step_tokens += plan.num_tokens - plan.num_ended
        counts.step_tokens_padded += plan.bucket.num_tokens
        counts.step_rows += len(plan.rows) - plan.num_ended
        counts.step_rows_padded += plan.bucket.num_rows
        counts.iteration_tokens.observe(plan.num_tokens)
        counts.prompt_tokens_computed += sum(chunk.count for chunk in plan.chunks)
        for seq in plan.admitted:
            if seq.started_s < 0:
                seq.started_s = self._clock()
                counts.prompt_tokens += seq.num_prompt
                counts.queue_time.observe(seq.started_s - seq.arrived_s)

    def _count_end(self, seq: Sequence, reason: FinishReason) -> None:
        counts = self._counts
        counts.finished[reason.value] = counts.finished.get(reason.value, 0) + 1
        if reason is FinishReason.ERROR or not seq.output:
            return
        self.scheduler.forecast.finished(seq, stopped=reason is FinishReason.STOP)
        counts.e2e_latency.observe(seq.last_token_s - seq.arrived_s)
        counts.decode_time.observe(seq.last_token_s - seq.first_token_s)
        counts.inference_time.observe(seq.last_token_s - seq.started_s)
        counts.request_preemptions.observe(seq.num_preemptions)
        counts.request_prompt_tokens.observe(seq.num_prompt)
        counts.request_generation_tokens.observe(len(seq.output))
        if len(seq.output) > 1:
            mean = (seq.last_token_s - seq.first_token_s) / (len(seq.output) - 1)
            counts.time_per_output_token.observe(mean)


def _make_scheduler(capacity: Capacity, config: EngineConfig, ladder: BucketLadder) -> Scheduler:
    options: dict[str, Any] = {"prefix_caching": config.prefix_caching, "step_cost_tokens": config.step_cost_tokens}
    if config.scheduling is Scheduling.STATIC:
        return StaticScheduler(capacity, ladder, **options)  # a baseline, without drafts
    if ladder.config.num_drafts:
        return SpeculativeScheduler(capacity, ladder, **options, weights_cost_tokens=config.weights_cost_tokens)
    return Scheduler(capacity, ladder, **options)


def _still_queued(seq: Sequence) -> bool:
    """Whether the deadline still applies. It does not for a preempted request, which was admitted before."""
    return seq.state in (State.COMPILING, State.WAITING) and seq.started_s < 0


class _Refused:
    """The handle of a step that never started."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def result(self) -> StepOutput:
        raise self._error


def _num_to_end(seq: Sequence, drawn: tuple[int, ...]) -> int:
    """How many of the next tokens of a request belong to it: those after its end do not."""
    for count, token in enumerate(drawn, 1):
        total = len(seq.output) + count
        if total == seq.limit or (token in seq.stop_ids and total >= seq.sampling.min_tokens):
            return count
    return len(drawn)


def _logprobs(output: StepOutput, row: int, num_tokens: int, count: int) -> tuple[TokenLogprobs, ...]:
    """Log-probabilities of the tokens that a row has drawn."""
    return tuple(
        _entry(output.logprobs, output.top_ids, output.top_logprobs, (row, i), count) for i in range(num_tokens)
    )


def _target_logprobs(output: StepOutput, position: int, count: int) -> TokenLogprobs:
    """Log-probabilities of the prompt token that follows a position of the step."""
    assert output.target_ranks is not None
    rank = int(output.target_ranks[position])
    return _entry(output.target_logprobs, output.target_top_ids, output.target_top_logprobs, position, count, rank)


def _entry(
    logprobs: np.ndarray | None,
    top_ids: np.ndarray | None,
    top_logprobs: np.ndarray | None,
    at: int | tuple[int, int],
    count: int,
    rank: int | None = None,
) -> TokenLogprobs:
    assert logprobs is not None and top_ids is not None and top_logprobs is not None
    return TokenLogprobs(
        logprob=float(logprobs[at]),
        top_ids=tuple(top_ids[at][:count].tolist()),
        top_logprobs=tuple(top_logprobs[at][:count].tolist()),
        rank=rank,
    )
