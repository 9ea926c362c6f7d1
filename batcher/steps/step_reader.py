"""Reads the results of steps: every token goes to its request, which may end there.

Most rows of a step are decodes whose request goes on. They are read by columns (`SlotColumns`); only the other rows are
looked at one by one.
"""

from __future__ import annotations

from itertools import chain, compress

import numpy as np

from batcher.delivery import Delivery, StepDelivery, Tokens, plain_output
from batcher.request import ErrorCode, FinishReason, RequestOutput
from batcher.requests import counting
from batcher.requests.live_requests import LiveRequests
from batcher.scheduling.request_state import RequestState, State
from batcher.scheduling.scheduler import Scheduler
from batcher.scheduling.speculation import may_have_drafts
from batcher.scheduling.step_plan import StepPlan
from batcher.stats import EngineStats
from batcher.step import StepOutput, Variant
from batcher.steps.pooling import embedding, take_pooled
from batcher.steps.scores import sampled_logprobs, take_prompt_logprobs, token_logprobs


class StepReading:
    """A step that is being read: its rows by columns, and those that were looked at."""

    def __init__(self, output: StepOutput, now: float) -> None:
        self.output = output
        self.now = now
        self.outputs: list[Delivery] = []
        self.rows: list[RequestState] = []  # by columns, with one token each
        self.numbers = np.empty(0, np.int64)  # i64[n], of these
        self.tokens = np.empty(0, np.int32)  # i32[n], of these
        self._looked_at: list[RequestState] = []  # those with plain tokens
        self._their_tokens: list[tuple[int, ...]] = []

    def add(self, seq: RequestState, tokens: tuple[int, ...]) -> None:
        """Adds the plain tokens of a request that was looked at."""
        self._looked_at.append(seq)
        self._their_tokens.append(tokens)

    def delivery(self) -> StepDelivery:
        """The delivery of the step: its outputs and plain tokens."""
        if not self._looked_at:
            return StepDelivery(self.outputs, self.rows, Tokens(self.numbers, self.tokens) if self.rows else None)
        numbers = np.concatenate([self.numbers, [seq.number for seq in self._looked_at]])
        token_ids = np.concatenate([self.tokens, np.array(list(chain.from_iterable(self._their_tokens)), np.int32)])
        counts = None
        if len(token_ids) > len(numbers):
            counts = np.ones(len(numbers), np.int32)
            counts[len(self.rows) :] = list(map(len, self._their_tokens))
        return StepDelivery(self.outputs, self.rows + self._looked_at, Tokens(numbers, token_ids, counts))


class StepReader:
    """Not thread-safe: the thread of the engine's core calls it."""

    def __init__(self, scheduler: Scheduler, requests: LiveRequests, counts: EngineStats) -> None:
        self._scheduler = scheduler
        self._requests = requests
        self._counts = counts

    def read(self, plan: StepPlan, output: StepOutput, now: float) -> StepDelivery:
        """The delivery of a step that has returned at time `now` (seconds by the clock)."""
        if plan.bucket.variant.scores:
            take_prompt_logprobs(plan, output)
        if plan.bucket.variant is Variant.EMBED:
            take_pooled(plan, output)
        reading = StepReading(output, now)
        if plan.bucket.num_drafts:
            self._read_drafts(plan, reading)
        else:
            self._read_tokens(plan, reading)
        self._scheduler.commit_some()
        return reading.delivery()

    def _read_tokens(self, plan: StepPlan, reading: StepReading) -> None:
        """Reads a step without drafts. Its rows are decodes, then chunks."""
        output = reading.output
        num_decodes = len(plan.rows) - len(plan.chunks)
        if plan.looks_up and output.would_accept is not None:  # a fallback program may not look up
            for seq, hit in zip(plan.rows, output.would_accept.tolist(), strict=False):
                if may_have_drafts(seq):
                    self._learn(seq, int(hit), 1)
        for row in self._read_columns(plan, num_decodes, reading):
            self._look_at(plan.rows[row], (int(output.tokens[row, 0]),), row, reading)
        for row in range(num_decodes, len(plan.rows)):
            if plan.emits[row]:
                self._look_at(plan.rows[row], (int(output.tokens[row, 0]),), row, reading)

    def _read_columns(self, plan: StepPlan, num_decodes: int, reading: StepReading) -> list[int]:
        """Reads the first rows, which are decodes, by columns. Returns those that need a look of their own."""
        columns = self._scheduler.columns
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
        gaps = reading.now - columns.last_token_s[slots]
        longest_s = counting.count_gaps(self._counts, gaps)
        if self._scheduler.policy is not None and longest_s > columns.shortest_itl_s:
            columns.num_late[slots] += gaps > columns.itl_s[slots]
        columns.last_token_s[slots] = reading.now
        left_of_page = columns.left_of_page[slots] - 1
        columns.left_of_page[slots] = left_of_page
        for row in np.flatnonzero(left_of_page <= 0).tolist():
            self._scheduler.commit_soon(rows[row])
        self._counts.generation_tokens += len(rows)
        reading.rows, reading.numbers, reading.tokens = rows, columns.numbers[slots], drawn
        return to_look_at

    def _read_drafts(self, plan: StepPlan, reading: StepReading) -> None:
        """Reads a step with drafts: how many were accepted, and each row's tokens up to its request's end."""
        output, drafts = reading.output, self._scheduler.drafts
        assert drafts is not None
        assert output.num_drafts is not None and output.num_accepted is not None and output.would_accept is not None
        proposed, accepted, would_accept = (
            x.tolist() for x in (output.num_drafts, output.num_accepted, output.would_accept)
        )
        tokens: list[list[int]] = output.tokens.tolist()
        for row, (seq, q_len) in enumerate(zip(plan.rows, plan.q_lens, strict=True)):
            drawn = tuple(tokens[row][: 1 + accepted[row]])
            drawn = drawn[: seq.num_to_end(drawn)]
            if seq.state is not State.FINISHED:
                self._scheduler.take_back(seq, q_len - len(drawn))
                if proposed[row] or (drafts.tells_would_accept and may_have_drafts(seq)):
                    self._learn(seq, max(accepted[row], int(would_accept[row])), max(q_len - 1, 1))
                self._counts.speculation.observe(proposed[row], accepted[row])
                seq.num_accepted += min(accepted[row], len(drawn))
                seq.num_rejected += proposed[row] - accepted[row]
                self._counts.speculation.num_undrafted_rows += not may_have_drafts(seq)
            self._look_at(seq, drawn, row, reading)

    def _learn(self, seq: RequestState, num_right: int, num_drafts: int) -> None:
        assert self._scheduler.drafts is not None, "only steps of this policy tell of drafts"
        self._scheduler.drafts.learn(seq, num_right, num_drafts, self._scheduler.last_step)

    def _look_at(self, seq: RequestState, tokens: tuple[int, ...], row: int, reading: StepReading) -> None:
        """Takes in the tokens of a row; only the last of them can end its request."""
        if seq.state is State.FINISHED:  # the surplus token of an ended request is dropped
            return
        if not _is_finite(reading.output, row, len(tokens)):
            reading.outputs.append(self._end_not_finite(seq))
            return
        if seq.pooling is not None:
            reading.outputs.append(self._end_embedded(seq))
            return
        columns, now, is_first = self._scheduler.columns, reading.now, seq.first_token_s < 0
        self._counts.generation_tokens += len(tokens)
        if not is_first:
            gap = (now - columns.last_token_of(seq)) / len(tokens)
            self._counts.inter_token_latency.observe(gap, len(tokens))
            columns.count_late(seq, gap, len(tokens))
        seq.output.extend(tokens)
        columns.looked(seq, now)
        output = plain_output(seq, tokens)
        if is_first:
            self._take_first(seq, output, now)
        if seq.sampling.logprobs is not None or seq.sampling.logprob_token_ids:
            output.logprobs = token_logprobs(reading.output, row, len(tokens), seq.sampling)
        if seq.sampling.sampled_logprobs:
            output.sampled_logprobs = sampled_logprobs(reading.output, row, len(tokens))
        if seq.request.counts_drafts:
            output.drafts = (seq.num_accepted, seq.num_rejected)
        self._end_if_over(seq, output)
        is_plain = not (is_first or output.logprobs or output.sampled_logprobs or output.drafts)
        if not is_plain or output.finish_reason is not None:
            reading.outputs.append((seq, output))
        else:
            reading.add(seq, tokens)
        if output.finish_reason is None:
            if seq.matcher is not None:
                self._requests.ask(seq, tokens)
            self._scheduler.commit(seq)
            columns.look_at_page(seq)

    def _take_first(self, seq: RequestState, output: RequestOutput, now: float) -> None:
        """A request has its first token."""
        seq.first_token_s = now
        counting.count_first_token(self._counts, seq)
        output.times = (seq.started_s - seq.arrived_s, now - seq.started_s)
        if seq.prompt_logprobs is not None:
            output.prompt_logprobs = tuple(entry for entry in seq.prompt_logprobs if entry is not None)
            assert len(output.prompt_logprobs) == seq.num_prompt - 1, "a prompt position was not scored"

    def _end_if_over(self, seq: RequestState, output: RequestOutput) -> None:
        """Ends the request if its last token ends it."""
        token, count = seq.output[-1], len(seq.output)
        if token in seq.stop_ids and count >= seq.sampling.min_tokens:
            output.finish_reason = FinishReason.STOP
            output.stop_reason = token if token in seq.sampling.stop_token_ids else None
        elif count == seq.limit:
            output.finish_reason = FinishReason.LENGTH
        if output.finish_reason is not None:
            self._requests.forget(seq, output.finish_reason)

    def _end_embedded(self, seq: RequestState) -> Delivery:
        vector = embedding(seq)
        if vector is None:
            return self._end_not_finite(seq)
        seq, output = self._requests.end(seq, FinishReason.STOP)
        output.embedding = vector
        return seq, output

    def _end_not_finite(self, seq: RequestState) -> Delivery:
        self._counts.corrupted_requests += 1
        position = seq.num_prompt + len(seq.output)
        message = f"the model's output for this request is not a finite number, at token {position}"
        delivery = self._requests.end(seq, FinishReason.ERROR, message, ErrorCode.NOT_FINITE)
        # `_end` has added the request's last full pages to the prefix cache, so `forget` must follow it.
        self._scheduler.pool.forget(seq.digests)  # not seq.pages: a request that was preempted in flight has none
        return delivery


def _is_finite(output: StepOutput, row: int, num_tokens: int) -> bool:
    """Whether the logits of a row's first tokens were finite."""
    return bool(output.finite[row] if output.finite.ndim == 1 else output.finite[row, :num_tokens].all())
