"""How many pages the running requests will hold in the steps to come: the look-ahead of admission.

A request with `ignore_eos` and no stop ids goes to its limit for certain. Any other stops earlier, with a probability
that `OutputLengths` has learned. An outlook adds up the expected pages of all requests and their variance over
intervals of future steps, and leaves room for ordinary bad luck.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

import numpy as np

from batcher.output_lengths import OutputLengths
from batcher.sequence import Sequence

_DEVIATIONS = 2.0  # standard deviations that are kept free above the expected pages of the next step
_HORIZON = 64  # steps; fewer deviations for later ones, since admission can hold back meanwhile if luck turns out bad


class Forecast(Protocol):
    """What admission asks about the future."""

    def finished(self, sequence: Sequence, *, stopped: bool) -> None:
        """A request with output has ended: by itself (`stopped`), or cut off by its limit or its client."""

    def outlook(self, running: Seq[Sequence], page_size: int) -> Outlook:
        """The outlook for the requests that run now."""


class Outlook(Protocol):
    """The pages of a growing set of requests in the steps to come."""

    def fits(self, sequence: Sequence, num_pages: int) -> bool:
        """Whether `num_pages` are expected to last if `sequence` joins."""

    def add(self, sequence: Sequence) -> None:
        """`sequence` has joined."""


class OutputForecast:
    """The forecast from the lengths of earlier outputs.

    Args:
        longest: tokens, the most that a request can emit.
    """

    def __init__(self, longest: int) -> None:
        self._lengths = OutputLengths(longest)
        self._starts = _ladder(longest)

    def finished(self, sequence: Sequence, *, stopped: bool) -> None:
        if sequence.stop_ids:
            self._lengths.observe(len(sequence.output), stopped=stopped)

    def outlook(self, running: Seq[Sequence], page_size: int) -> PageOutlook:
        emitted = np.array([seq.num_emitted for seq in running if seq.stop_ids], np.int64)
        outlook = PageOutlook(self._lengths, self._lengths.survival(emitted), self._starts, page_size)
        outlook.extend(running)
        return outlook


class PageOutlook:
    """Expected pages and their variance, over intervals of future steps.

    Every request gains one token a step until it ends and gives its pages back. Within an interval it counts as alive
    with the probability at the interval's start and with its pages at the interval's end.

    Args:
        survival: f64[B], of `lengths`.
        starts: i64[t], the first step of each interval, from now; ascending.
        page_size: tokens.
    """

    def __init__(self, lengths: OutputLengths, survival: np.ndarray, starts: np.ndarray, page_size: int) -> None:
        self._lengths = lengths
        self._survival = survival
        self._starts = starts
        self._lasts = np.append(starts[1:] - 1, starts[-1])
        self._page_size = page_size
        self._deviations = _DEVIATIONS / np.sqrt(1 + starts / _HORIZON)
        self._sums = np.zeros((3, starts.size))

    def fits(self, sequence: Sequence, num_pages: int) -> bool:
        mean, variance, most = self._sums + self._moments([sequence])
        # A normal distribution has no upper end, but a few requests have: their pages if all of them go on.
        return bool((np.minimum(mean + self._deviations * np.sqrt(variance), most) <= num_pages).all())

    def add(self, sequence: Sequence) -> None:
        self.extend([sequence])

    def extend(self, sequences: Seq[Sequence]) -> None:
        if sequences:
            self._sums += self._moments(sequences)

    def _moments(self, sequences: Seq[Sequence]) -> np.ndarray:
        """f64[3, t]: pages of `sequences`, their mean, their variance and the most there can be."""
        emitted = np.array([seq.num_emitted for seq in sequences])[:, None]
        left = np.array([seq.limit for seq in sequences])[:, None] - emitted
        may_stop = np.array([bool(seq.stop_ids) for seq in sequences])[:, None]
        shared = np.array([seq.num_hit_pages * self._page_size for seq in sequences])[:, None]
        own_tokens = np.array([seq.num_prompt for seq in sequences])[:, None] + emitted - shared
        goes_on = self._survival[self._lengths.bins(emitted + self._starts)]
        goes_on /= self._survival[self._lengths.bins(emitted)]
        within = self._starts <= left
        alive = np.where(may_stop, goes_on, 1.0) * within
        pages = -(-(own_tokens + np.minimum(self._lasts, left)) // self._page_size)
        variance = alive * (1 - alive) * pages * pages
        return np.stack([(alive * pages).sum(axis=0), variance.sum(axis=0), (within * pages).sum(axis=0)])


def _ladder(longest: int) -> np.ndarray:
    """i64[t], steps from now up to `longest`: each of the first ones, then about three per octave."""
    steps = [0, 1, 2, 3, 4, 5, 6, 8]
    while steps[-1] < longest:
        steps.append(steps[-1] * 5 // 4)
    return np.array(steps)
