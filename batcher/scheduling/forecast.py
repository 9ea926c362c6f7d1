"""The look-ahead of admission: the pages that the running requests are expected to hold in future steps.

A request with `ignore_eos` and no stop ids always runs to its limit. Any other request may stop earlier, with a
probability that `OutputLengths` estimates. An outlook sums the expected pages of all requests and their variance, over
intervals of future steps, and keeps some standard deviations free.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from batcher.scheduling.output_lengths import OutputLengths
from batcher.scheduling.request_state import RequestState

_DEVIATIONS = 2.0  # standard deviations that are kept free above the expected pages of the next step
_HORIZON = 64  # steps; fewer deviations are kept free for later steps, because admission can still react until then


class Forecast(Protocol):
    """Learns from ended requests, and makes outlooks for admission."""

    def finished(self, sequence: RequestState, *, stopped: bool) -> None:
        """Learns from a request with output: it ended by itself (`stopped`), or at its limit, or by its client."""

    def outlook(self, running: Sequence[RequestState], page_size: int) -> Outlook:
        """The outlook for the requests that run now."""


class Outlook(Protocol):
    """The expected pages of a growing set of requests in future steps."""

    def fits(self, sequence: RequestState, num_pages: int) -> bool:
        """Whether `num_pages` are expected to suffice if `sequence` is added."""

    def add(self, sequence: RequestState) -> None:
        """Adds `sequence` to the set."""


class OutputForecast:
    """The forecast from the lengths of earlier outputs.

    Args:
        longest: tokens, the most that a request can emit.
    """

    def __init__(self, longest: int) -> None:
        self._lengths = OutputLengths(longest)
        self._starts = _ladder(longest)

    def finished(self, sequence: RequestState, *, stopped: bool) -> None:
        if sequence.stop_ids:
            self._lengths.observe(len(sequence.output), stopped=stopped)

    def outlook(self, running: Sequence[RequestState], page_size: int) -> PageOutlook:
        emitted = np.array([seq.num_emitted for seq in running if seq.stop_ids], np.int64)
        outlook = PageOutlook(self._lengths, self._lengths.survival(emitted), self._starts, page_size)
        outlook.extend(running)
        return outlook


class PageOutlook:
    """Expected pages and their variance, over intervals of future steps.

    Every request gains one token per step until it ends and releases its pages. Within an interval, the probability
    that it still runs is taken from the interval's start, and its pages are taken from the interval's end.

    Args:
        survival: f64[B], the survival function of output lengths (`OutputLengths.survival`).
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

    def fits(self, sequence: RequestState, num_pages: int) -> bool:
        mean, variance, most = self._sums + self._moments([sequence])
        # A normal distribution has no upper bound, but the pages do: `most`, if no request ends before its limit.
        return bool((np.minimum(mean + self._deviations * np.sqrt(variance), most) <= num_pages).all())

    def add(self, sequence: RequestState) -> None:
        self.extend([sequence])

    def extend(self, sequences: Sequence[RequestState]) -> None:
        if sequences:
            self._sums += self._moments(sequences)

    def _moments(self, sequences: Sequence[RequestState]) -> np.ndarray:
        """f64[3, t]: mean, variance and maximum of the pages of `sequences`."""
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
