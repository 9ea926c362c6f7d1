"""Steps in which a row may draw several tokens: how many it has room for, and the plan of such a step."""

from __future__ import annotations

import numpy as np

from batcher.scheduling.plan import StepPlan
from batcher.scheduling.request_state import RequestState
from batcher.scheduling.scheduler import Scheduler
from batcher.step import Bucket


class SeveralTokensScheduler(Scheduler):
    """A scheduler whose decodes may bring more than one token."""

    def _fit(self, seq: RequestState, most: int, grown: list[tuple[RequestState, int]]) -> int:
        """The tokens that a row brings, at most `most`: within its limit, and within pages that are available now. They
        never make another request wait or give way."""
        most = min(most, seq.limit - seq.num_emitted)
        while seq.num_computed + most > len(seq.pages) * self.page_size and self.pool.num_available:
            grown.append(self._grow(seq))
        return min(most, len(seq.pages) * self.page_size - seq.num_computed)

    def _plan_several(
        self, rows: list[tuple[RequestState, int]], bucket: Bucket, grown: list[tuple[RequestState, int]]
    ) -> StepPlan:
        """The step of these rows and the tokens that each one brings. Rows of one token come first."""
        self.last_step += 1
        rows = [row for row in rows if row[1] == 1] + [row for row in rows if row[1] > 1]
        plan = StepPlan(
            number=self.last_step,
            bucket=bucket,
            rows=[seq for seq, _ in rows],
            slots=np.array([seq.slot for seq, _ in rows]),
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
