"""The budget that limits how many tokens of prompts one step computes."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBudget:
    """The budget of a step, in tokens or in estimated time.

    A token of a prompt costs the time of its matrix products, and the time of its attention, which grows with the
    context before it. In estimated time, a chunk of `count` tokens after `past` tokens costs
    `count + (past * count + count^2 / 2) / even_context`. The unit is the time of one token's products. A step may cost
    as much as a chunk of `tokens` tokens at the beginning of a prompt. Such a chunk is not cut, and later chunks are
    shorter, so that no step takes longer.

    Each decode counts as one token, because it cannot be postponed.
    """

    tokens: int  # most tokens of a step
    even_context: float = math.inf  # tokens of context whose attention costs as much as the products; inf: ignore it

    @property
    def time(self) -> float:
        """The most that a step may cost."""
        return self.cost(0, self.tokens)

    def cost(self, past: int, count: int) -> float:
        """The cost of a chunk of `count` tokens after `past` tokens."""
        return count + (past + count / 2) * count / self.even_context

    def fitting(self, past: int, most: int, time: float) -> int:
        """The largest number of tokens of a chunk, at most `most`, that cost no more than `time`. It may be 0."""
        if self.cost(past, most) <= time:
            return most
        per_token = 1 + past / self.even_context
        # The root of count^2 / (2 * even) + count * per_token = time, in the form that does not cancel.
        count = 2 * time / (per_token + math.sqrt(per_token * per_token + 2 * max(0.0, time) / self.even_context))
        return max(0, min(most, math.floor(count)))
