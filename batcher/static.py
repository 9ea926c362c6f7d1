"""Static batching: the baseline that continuous batching is measured against, with everything else equal."""

from __future__ import annotations

from batcher.plan import StepPlan
from batcher.scheduler import Scheduler, Verdict
from batcher.sequence import Sequence
from batcher.step import Bucket, Variant


class StaticScheduler(Scheduler):
    """Takes as many waiting requests as fit, computes all their prompts, then decodes until the longest has ended.

    Nobody joins meanwhile, and a row that has ended stays in the shape of every further step, as in a padded batch.
    Pages for prompt and output are reserved up front, so nothing is ever preempted. Prompts are chunked and cached as
    in continuous scheduling, and the rows of ended requests attend to nothing: both are in this baseline's favour.
    """

    _batch_rows = 0

    def schedule(self) -> StepPlan | None:
        admitted: list[Sequence] = []
        if not self.running:
            if self._held:
                return None  # the batch before still has rows in flight
            while self.waiting and self._admit(self.waiting[0], set()) is Verdict.ADMITTED:
                admitted.append(self.running[-1])
            self._batch_rows = len(admitted)
        chunks: list[tuple[Sequence, int]] = []
        budget = self.max_tokens
        for seq in self.running:
            if not seq.decoding and budget:
                chunks.append((seq, min(len(seq.known) - seq.num_computed, budget)))
                budget -= chunks[-1][1]
        decodes = [] if chunks else [seq for seq in self.running if seq.num_emitted < seq.limit]
        if not chunks and not decodes:
            return None
        return self._plan(decodes, chunks, admitted, grown=[])

    def _pages_at_admission(self, seq: Sequence) -> int:
        return self._full_pages(seq)

    def _has_room(self, seq: Sequence, num_new: int, num_revived: int) -> bool:
        return num_new + num_revived <= self.pool.num_available

    def _bucket(self, num_tokens: int, num_rows: int, *, decode_only: bool, variant: Variant) -> Bucket:
        if decode_only:
            num_tokens = num_rows = self._batch_rows
        return super()._bucket(num_tokens, num_rows, decode_only=decode_only, variant=variant)
