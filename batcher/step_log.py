"""A sample of the steps of the last seconds: which slots each step served, and with what."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from batcher.plan import StepPlan

IDLE, DECODE, PREFILL = b".dp"
SAMPLE_S = 0.05  # at most one step in this time is kept
NUM_KEPT = 60  # three seconds of samples, so that a reader that comes every second may miss one reading


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step as it was dispatched."""

    number: int
    time_s: float  # by the engine's clock
    variant: str
    num_tokens: int  # real tokens
    num_tokens_padded: int  # tokens of the compiled shape
    slots: str  # one character a slot: "." idle, "d" decode, "p" prefill; idle slots at the end are left out


class StepLog:
    """Not thread-safe: the engine's thread owns it."""

    def __init__(self) -> None:
        self._records: deque[StepRecord] = deque(maxlen=NUM_KEPT)
        self._next_s = float("-inf")

    def dispatched(self, plan: StepPlan, now: float) -> None:
        """Keeps `plan` where the last kept step is `SAMPLE_S` or more ago."""
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
