"""A sample of the steps of the last seconds: the slots that each step served, and whether by decode or prefill."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from batcher.scheduling.step_plan import StepPlan

IDLE, DECODE, PREFILL = b".dp"
SAMPLE_S = 0.05  # at most one step is kept in this time
NUM_KEPT = 60  # three seconds of samples: enough for a reader that reads once a second and misses one reading


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step as it was dispatched."""

    number: int
    time_s: float  # by the engine's clock
    variant: str
    num_tokens: int  # real tokens
    num_tokens_padded: int  # tokens of the compiled shape
    slots: str  # one character per slot: "." idle, "d" decode, "p" prefill; without the idle slots at the end


class StepLog:
    """Not thread-safe: the engine's thread owns it."""

    def __init__(self) -> None:
        self._records: deque[StepRecord] = deque(maxlen=NUM_KEPT)
        self._next_s = float("-inf")

    def dispatched(self, plan: StepPlan, now: float) -> None:
        """Keeps `plan` if the last kept step is at least `SAMPLE_S` ago."""
        if now < self._next_s:
            return
        self._next_s = now + SAMPLE_S
        bucket = plan.bucket
        self._records.append(
            StepRecord(plan.number, now, bucket.variant.name, plan.num_tokens, bucket.num_tokens, _slots(plan))
        )

    def recent(self) -> list[StepRecord]:
        """The kept steps, oldest first."""
        return list(self._records)


def _slots(plan: StepPlan) -> str:
    marks = bytearray([IDLE]) * (1 + max(seq.slot for seq in plan.rows))
    for seq in plan.rows:
        marks[seq.slot] = DECODE
    for chunk in plan.chunks:
        marks[plan.rows[chunk.row].slot] = PREFILL
    return marks.decode()
