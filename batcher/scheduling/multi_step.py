"""Several decode steps in one program, while no request needs the host between them.

A step that is shorter than the host's work leaves the device idle between two steps. A program of several steps is
dispatched and read once. A request that arrives meanwhile waits for it, so their number is bounded by their time.

A program has several steps only if all running requests decode and none waits, and if no token depends on a mask that
the host computes. A request that ends inside takes its first tokens; the others are dropped, and their K/V are neither
read nor stored as a prefix.
"""

from __future__ import annotations

from collections.abc import Sequence

from batcher.buckets import BucketLadder
from batcher.scheduling.request_state import RequestState
from batcher.scheduling.row_tokens import OneToken, SeveralTokens
from batcher.scheduling.step_plan import StepPlan
from batcher.step import Variant

MOST_DELAY_S = 0.004  # of an arrival, for the steps in flight that would not be there with one step a program
_WEIGHT = 0.2  # weight of the last step in the estimate of a step's time


class SeveralSteps(OneToken):
    """The policy of programs with several steps: every row draws a token in each."""

    def __init__(self, ladder: BucketLadder, pipeline_depth: int) -> None:
        self._ladder = ladder
        self._pipeline_depth = pipeline_depth
        self._step_s: dict[int, float] = {}  # padded rows -> seconds of one decode step

    def took(self, plan: StepPlan, seconds: float) -> None:
        if plan.chunks:
            return
        rows, last = plan.bucket.num_rows, seconds / max(plan.q_lens)
        known = self._step_s.get(rows, last)
        self._step_s[rows] = known + _WEIGHT * (last - known)

    def several(
        self, decodes: Sequence[RequestState], step: int, *, is_alone: bool, has_adapters: bool = False
    ) -> SeveralTokens | None:
        if not is_alone or any(seq.matcher is not None for seq in decodes):
            return None
        variant = Variant.SAMPLE if any(seq.needs_sampling for seq in decodes) else Variant.GREEDY
        bucket = self._ladder.choose_several(len(decodes), variant, has_adapters=has_adapters)
        most = 1 if bucket is None else min(self._most_steps(bucket.num_rows), bucket.num_steps)
        return None if bucket is None or most == 1 else SeveralTokens(bucket, dict.fromkeys(decodes, most))

    def _most_steps(self, num_rows: int) -> int:
        """The steps of one program. It is one until a step's time is known."""
        step_s = self._step_s.get(num_rows)
        if step_s is None:
            return 1
        most = self._ladder.config.num_steps
        added_s = MOST_DELAY_S / self._pipeline_depth
        return most if (most - 1) * step_s <= added_s else 1 + int(added_s / step_s)
