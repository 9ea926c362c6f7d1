"""Speculative steps: decodes have drafts if these are expected to pay. The device proposes and verifies them.

The host plans such a step with the most tokens that each row can draw. Until the step returns, only the device knows
how many it has drawn; the host then corrects its counts. So the next step is dispatched before this one returns, as
without drafts.

A step has drafts only if it has no prompt chunk. Whether drafts pay is estimated from the drafts that were right so
far, from the times of a step with drafts and of one without in the platform's table (`StepTimes`), and from that of the
passes of a draft model. A row takes as many drafts of a model as are likely enough to be right for a pass.

Drafts that do not pay are tried again from time to time (`Retries`). If drafts are looked up, a retry is a step without
drafts that also tells whether the first ones would have been right; other steps without drafts do not look up. A retry
of a draft model is one draft of one row, because the draft model must read all tokens of the row before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from batcher.buckets import BucketLadder
from batcher.scheduling.request_state import RequestState
from batcher.step import Bucket, Variant
from batcher.step_times import StepTimes

_LEAST_GAIN = 0.1  # accepted drafts per step; a row that expects fewer has none
_FIRST_RATE = 0.5  # probability of a right draft before anything is known, if it is looked up
_FIRST_RATE_OF_A_MODEL = 0.8
# Of the last draft in a row's estimate. A lookup is right in bursts, where a text repeats itself. A model is right at a
# rate that changes slowly: with a larger weight, chance alone would often end drafts that pay.
_ROW_WEIGHT = 0.25
_ROW_WEIGHT_OF_A_MODEL = 0.08
_USUAL_WEIGHT = 0.05  # of the last draft in the estimate for new requests
_RETRIES = (1, 16)  # steps to the first retry of a look-up, and at most
_RETRIES_OF_A_MODEL = (16, 256)


class Retries:
    """When drafts that do not pay are tried again: after a wait that doubles each time. A right draft shortens it.

    Args:
        first, most: steps of the first and of the longest wait.
    """

    def __init__(self, first: int, most: int) -> None:
        self._first, self._most = first, most
        self._wait = first
        self._due = 0  # a step

    def is_due(self, step: int) -> bool:
        """Whether the step should try drafts that are not expected to pay."""
        return step >= self._due

    def tried(self, step: int) -> None:
        """Records that the step tries such drafts. Their result is not known yet."""
        self._due = step + self._wait
        self._wait = min(2 * self._wait, self._most)

    def was_right(self, step: int) -> None:
        """Records that a draft was right. `step` is the number of the last planned step."""
        self._wait = max(self._wait // 4, self._first)
        self._due = min(self._due, step + self._wait)

    def paid(self, step: int) -> None:
        """Records that the step has drafts that are expected to pay."""
        self._wait = self._first
        self._due = step + self._first


@dataclass(frozen=True, slots=True)
class ChosenDrafts:
    """The drafts of one step. If no row can have any, the step is a plain one."""

    bucket: Bucket  # the bucket of the program with drafts
    counts: Mapping[RequestState, int]  # most drafts of a row; the other rows have none
    looks_up: bool  # a plain step tells which drafts would have been right


class Drafts:
    """The policy of steps with drafts: a row draws one token and its drafts that are right. The scheduler asks it once
    a step, and reduces the answer to each request's limit and to the available pages.

    Args:
        draft_cost: time of a pass of the draft model, in passes of the model; 0: drafts are looked up, which is cheap,
            so that rows without drafts tell if the first one would have been right.
    """

    def __init__(self, ladder: BucketLadder, time_of: StepTimes, draft_cost: float) -> None:
        self.tells_would_accept = draft_cost == 0
        self._ladder = ladder
        self._time_of = time_of
        self._draft_cost = draft_cost
        self._num_drafts = ladder.config.num_drafts
        # Of requests without a draft of their own.
        self.usual_rate = _FIRST_RATE if self.tells_would_accept else _FIRST_RATE_OF_A_MODEL
        self._row_weight = _ROW_WEIGHT if self.tells_would_accept else _ROW_WEIGHT_OF_A_MODEL
        self._retries = Retries(*(_RETRIES if self.tells_would_accept else _RETRIES_OF_A_MODEL))
        self._num_retries = 0

    def learn(self, seq: RequestState, num_right: int, num_drafts: int, last_step: int) -> None:
        """Records that the first `num_right` of a row's `num_drafts` drafts were right. `last_step` is the number of
        the last planned step."""
        rate = self._rate(seq)
        for is_right in [1] * num_right + [0] * (num_right < num_drafts):
            rate += self._row_weight * (is_right - rate)
            self.usual_rate += _USUAL_WEIGHT * (is_right - self.usual_rate)
        seq.draft_rate = rate
        if num_right:
            self._retries.was_right(last_step)

    def choose(self, decodes: Sequence[RequestState], step: int, *, has_adapters: bool = False) -> ChosenDrafts | None:
        """The drafts of the rows of step number `step`; None: there are none. `has_adapters`: a row has an adapter."""
        variant = Variant.SAMPLE if any(seq.needs_sampling for seq in decodes) else Variant.GREEDY
        bucket = self._ladder.choose_drafts(len(decodes), variant, has_adapters=has_adapters)
        if bucket is None or not any(map(may_have_drafts, decodes)):
            return None
        wanted = self._wanted(decodes, bucket)
        if wanted and (self.tells_would_accept or len(wanted) == len(decodes)):
            self._retries.paid(step)
        elif not self.tells_would_accept and self._retries.is_due(step):
            wanted |= self._retry([seq for seq in decodes if seq not in wanted], step)
        looks_up = self.tells_would_accept and self._retries.is_due(step)
        if looks_up:
            self._retries.tried(step)
        return ChosenDrafts(bucket, wanted, looks_up)

    def _wanted(self, decodes: Sequence[RequestState], bucket: Bucket) -> dict[RequestState, int]:
        """The rows of a step that are to have drafts, with their number; none if drafts are not expected to pay."""
        lengths = {seq: self._num_worth_a_pass(seq) for seq in decodes}
        gains = {seq: self._gain(seq, length) for seq, length in lengths.items()}
        plain, speculative = self._time_of(bucket.num_rows), self._time_of(bucket.num_tokens)
        # The draft model's first pass has two tokens a row, and each further one has one.
        passes = self._time_of(2 * bucket.num_rows) + (max(lengths.values()) - 1) * plain
        speculative += self._draft_cost * passes
        if (len(decodes) + sum(gains.values())) * plain <= len(decodes) * speculative:
            return {}
        return {seq: lengths[seq] for seq, gain in gains.items() if gain >= _LEAST_GAIN}

    def _retry(self, undrafted: list[RequestState], step: int) -> dict[RequestState, int]:
        """One draft of one of the rows, of another row each time."""
        rows = [seq for seq in undrafted if may_have_drafts(seq)]
        if not rows:
            return {}
        self._retries.tried(step)
        self._num_retries += 1
        return {rows[self._num_retries % len(rows)]: 1}

    def _num_worth_a_pass(self, seq: RequestState) -> int:
        """The drafts that are right more often than their pass costs, in the model's passes."""
        if not may_have_drafts(seq):
            return 0
        rate = self._rate(seq)
        return sum(rate**place > self._draft_cost for place in range(1, self._num_drafts + 1))

    def _gain(self, seq: RequestState, num_drafts: int) -> float:
        """The accepted drafts that a row is expected to have in a step."""
        rate = self._rate(seq)
        return sum(rate**place for place in range(1, num_drafts + 1))

    def _rate(self, seq: RequestState) -> float:
        return self.usual_rate if seq.draft_rate is None else seq.draft_rate


def may_have_drafts(seq: RequestState) -> bool:
    """Whether several tokens of the request can be drawn in one step. Under a grammar, the mask of the second token
    depends on the first one."""
    return seq.matcher is None
