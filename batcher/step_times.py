"""The times of steps: a table of decodes, and estimates of all steps."""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass
from typing import Protocol


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


class StepEstimate(Protocol):
    """An estimate of the time of any step. It may be wrong by a constant factor, which is learnt."""

    def seconds(self, num_tokens: int, num_rows: int, *, kv_tokens: float, pairs: float) -> float:
        """The seconds of a step.

        Args:
            num_tokens: padded, as `num_rows`.
            kv_tokens: tokens whose K/V are read, of all rows.
            pairs: of a query and a token that it attends to.
        """


@dataclass(frozen=True, slots=True)
class PerTokenEstimate:
    """Steps that take a constant time, and a time for each padded token and for each pair."""

    step_s: float
    token_s: float
    pair_s: float = 0.0

    def seconds(self, num_tokens: int, num_rows: int, *, kv_tokens: float, pairs: float) -> float:
        return self.step_s + self.token_s * num_tokens + self.pair_s * pairs
