"""Speculative steps: decodes bring drafts where these are expected to pay. The device proposes and verifies them.

The host plans such a step with the most tokens that each row can draw. The device alone knows how many it has drawn
until the step returns; the host then takes the others back. So the next step is dispatched before this one returns, as
without drafts.

A step has drafts only if it has no prompt chunk. Whether drafts pay is estimated from the drafts that were right so
far, and from the cost of a step: that of reading the weights, and that of computing its padded tokens.
"""

from __future__ import annotations

from batcher.buckets import BucketLadder
from batcher.plan import StepPlan
from batcher.scheduler import Scheduler
from batcher.sequence import Sequence
from batcher.step import Bucket, Capacity, Variant

_LEAST_GAIN = 0.1  # accepted drafts per step; a row that expects fewer has none
_FIRST_RATE = 0.5  # probability of a right draft before anything is known
_ROW_WEIGHT = 0.25  # of the last draft in a row's estimate
_USUAL_WEIGHT = 0.02  # of the last draft in the estimate for new requests


class SpeculativeScheduler(Scheduler):
    """A scheduler whose steps may have drafts.

    Args:
        weights_cost_tokens: tokens whose computation takes as long as reading the weights.
    """

    def __init__(
        self,
        capacity: Capacity,
        ladder: BucketLadder,
        *,
        prefix_caching: bool,
        step_cost_tokens: int,
        weights_cost_tokens: float,
    ) -> None:
        super().__init__(capacity, ladder, prefix_caching=prefix_caching, step_cost_tokens=step_cost_tokens)
        self.weights_cost_tokens = weights_cost_tokens
        self.num_drafts = ladder.config.num_drafts
        self._usual_rate = _FIRST_RATE  # of requests without a draft of their own

    def learn(self, seq: Sequence, num_right: int, num_drafts: int) -> None:
        """Of a row's `num_drafts`, the first `num_right` were right. Steps without drafts tell of the first one, which
        they look up and do not compute: so the estimate costs nothing while drafts do not pay."""
        rate = self._rate(seq)
        for is_right in [1] * num_right + [0] * (num_right < num_drafts):
            rate += _ROW_WEIGHT * (is_right - rate)
            self._usual_rate += _USUAL_WEIGHT * (is_right - self._usual_rate)
        seq.draft_rate = rate

    def _plan(
        self,
        decodes: list[Sequence],
        chunks: list[tuple[Sequence, int]],
        admitted: list[Sequence],
        grown: list[tuple[Sequence, int]],
    ) -> StepPlan:
        if not chunks:
            variant = Variant.SAMPLE if any(seq.needs_sampling for seq in decodes) else Variant.GREEDY
            bucket = self.ladder.choose_speculative(len(decodes), variant)
            drafted = [] if bucket is None else self._rows_with_drafts(decodes, bucket)
            q_lens = {seq: self._fit(seq, grown) for seq in drafted}
            if bucket is not None and any(q_len > 1 for q_len in q_lens.values()):
                return self._plan_drafts([(seq, q_lens.get(seq, 1)) for seq in decodes], bucket, grown)
        return super()._plan(decodes, chunks, admitted, grown)

    def _rows_with_drafts(self, decodes: list[Sequence], bucket: Bucket) -> list[Sequence]:
        """The rows of a step that are to have drafts; none if drafts are not expected to pay."""
        gains = {seq: self._gain(seq) for seq in decodes}
        plain = self.weights_cost_tokens + bucket.num_rows
        speculative = self.weights_cost_tokens + bucket.num_tokens
        if (len(decodes) + sum(gains.values())) * plain <= len(decodes) * speculative:
            return []
        return [seq for seq, gain in gains.items() if gain >= _LEAST_GAIN]

    def _gain(self, seq: Sequence) -> float:
        """The accepted drafts that a row is expected to have in a step."""
        rate = self._rate(seq)
        return sum(rate**place for place in range(1, self.num_drafts + 1)) if may_have_drafts(seq) else 0.0

    def _rate(self, seq: Sequence) -> float:
        return self._usual_rate if seq.draft_rate is None else seq.draft_rate

    def _fit(self, seq: Sequence, grown: list[tuple[Sequence, int]]) -> int:
        """The tokens that a row with drafts brings: within its limit, and within pages that are available now. Drafts
        never make another request wait or give way."""
        most = min(1 + self.num_drafts, seq.limit - seq.num_emitted)
        while seq.num_computed + most > len(seq.pages) * self.page_size and self.pool.num_available:
            grown.append(self._grow(seq))
        return min(most, len(seq.pages) * self.page_size - seq.num_computed)

    def _plan_drafts(
        self, rows: list[tuple[Sequence, int]], bucket: Bucket, grown: list[tuple[Sequence, int]]
    ) -> StepPlan:
        self.last_step += 1
        rows = [row for row in rows if row[1] == 1] + [row for row in rows if row[1] > 1]
        plan = StepPlan(
            number=self.last_step,
            bucket=bucket,
            rows=[seq for seq, _ in rows],
            q_lens=[q_len for _, q_len in rows],
            emits=[1] * len(rows),
            num_singles=sum(q_len == 1 for _, q_len in rows),
            num_tokens=sum(q_len for _, q_len in rows),
            grown=grown,
        )
        for seq, q_len in rows:
            seq.num_computed += q_len
            seq.num_emitted += q_len
            seq.last_step = plan.number
            if seq.mask is not None:
                plan.masks.append((seq, seq.take_mask()))
        return plan


def may_have_drafts(seq: Sequence) -> bool:
    """Whether several tokens of the request can be drawn in one step. Under a grammar, the mask of the second token
    depends on the first one."""
    return seq.matcher is None
