"""The time of a decode step, by the number of its tokens."""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """A table of the times of steps that draw after each of their tokens: decodes, with drafts or without.

    Times between two entries are interpolated linearly, and times outside the table are extrapolated linearly. The
    times may be in any unit, because they are only compared with each other.
    """

    num_tokens: tuple[int, ...]  # padded numbers of tokens, in ascending order
    times: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.num_tokens) != len(self.times) or len(self.times) < 2:
            raise ValueError(f"a table of step times has two entries or more: {self}")
        if sorted(set(self.num_tokens)) != list(self.num_tokens) or min(self.times) < 0:
            raise ValueError(f"the tokens of a table rise, and steps take some time: {self}")

    def __call__(self, num_tokens: int) -> float:
        """The time of a step with `num_tokens` tokens."""
        right = min(max(bisect(self.num_tokens, num_tokens), 1), len(self.times) - 1)
        left = right - 1
        pace = (self.times[right] - self.times[left]) / (self.num_tokens[right] - self.num_tokens[left])
        return self.times[left] + (num_tokens - self.num_tokens[left]) * pace
