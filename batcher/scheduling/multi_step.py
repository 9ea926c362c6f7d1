"""Several decode steps in one program, while no request needs the host between them.

A step that is shorter than the host's work leaves the device idle between two steps. A program of several steps is
dispatched and read once. A request that arrives meanwhile waits for it, so their number is bounded by their time.

A program has several steps only if all running requests decode and none waits, and if no token depends on a mask that
the host computes. A request that ends inside takes its first tokens; the others are dropped, and their K/V are neither
read nor stored as a prefix.
"""

from __future__ import annotations

from batcher.buckets import BucketLadder
from batcher.config import EngineConfig
from batcher.scheduling.plan import StepPlan, Work
from batcher.scheduling.several_tokens import SeveralTokensScheduler
from batcher.step import Capacity, Variant

MOST_DELAY_S = 0.004  # of an arrival, for the steps in flight that would not be there with one step a program
_WEIGHT = 0.2  # of the last step in the estimate of a step's time


class MultiStepScheduler(SeveralTokensScheduler):
    """A scheduler whose programs may have several steps."""

    def __init__(self, capacity: Capacity, ladder: BucketLadder, config: EngineConfig) -> None:
        super().__init__(capacity, ladder, config)
        self._pipeline_depth = config.pipeline_depth
        self._step_s: dict[int, float] = {}  # padded rows -> seconds of one decode step

    def took(self, plan: StepPlan, seconds: float) -> None:
        """A plan's program has run for so long on the device."""
        if plan.chunks:
            return
        rows, last = plan.bucket.num_rows, seconds / max(plan.q_lens)
        known = self._step_s.get(rows, last)
        self._step_s[rows] = known + _WEIGHT * (last - known)

    def _plan(self, work: Work) -> StepPlan:
        decodes = work.decodes
        no_other_work = not work.chunks and not self.waiting and len(decodes) == len(self.running)
        if no_other_work and all(seq.matcher is None for seq in decodes):
            variant = Variant.SAMPLE if any(seq.needs_sampling for seq in decodes) else Variant.GREEDY
            bucket = self.ladder.choose_multi_step(len(decodes), variant)
            most = 1 if bucket is None else self._most_steps(bucket.num_rows)
            if bucket is not None and most > 1:
                rows = [(seq, self._fit(seq, min(most, bucket.num_steps), work.grown)) for seq in decodes]
                return self._plan_several(rows, bucket, work.grown)
        return super()._plan(work)

    def _most_steps(self, num_rows: int) -> int:
        """The steps of one program. It is one until a step's time is known."""
        step_s = self._step_s.get(num_rows)
        if step_s is None:
            return 1
        most = self.ladder.config.num_steps
        added_s = MOST_DELAY_S / self._pipeline_depth
        return most if (most - 1) * step_s <= added_s else 1 + int(added_s / step_s)
