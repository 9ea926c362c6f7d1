"""How much memory the running requests will still need: the look-ahead of admission.

A request with `ignore_eos` and no stop ids goes to its limit for certain. Any other may, but few do: a chat without
`max_tokens` could fill the context and stops after a paragraph. For those the forecast is the share of their limit that
finished requests used, a moving average; where it was too low, a preemption raises it at once.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from batcher.sequence import Sequence

_START = 0.5  # before anything has finished
_MEMORY = 32  # finished requests that the average reaches back
_AFTER_PREEMPTION = 1.25


class OutputForecast:
    """The share of its limit that a request is expected to generate."""

    def __init__(self) -> None:
        self.share = _START
        self._num_seen = 1  # the start counts as one, so that the first requests teach quickly

    def finished(self, sequence: Sequence) -> None:
        if sequence.stop_ids:
            used = len(sequence.output) / sequence.limit
            self._num_seen = min(self._num_seen + 1, _MEMORY)
            self.share += (used - self.share) / self._num_seen

    def preempted(self) -> None:
        self.share = min(1.0, self.share * _AFTER_PREEMPTION + 0.01)

    def remaining(self, sequences: Seq[Sequence]) -> np.ndarray:
        """i64[n], tokens that each is expected to emit in steps yet to come."""
        left = np.array([s.limit - s.num_emitted for s in sequences])
        may_stop = np.array([bool(s.stop_ids) for s in sequences])
        return np.where(may_stop, np.ceil(self.share * left), left).astype(np.int64)


def peak_pages(own_tokens: np.ndarray, remaining: np.ndarray, page_size: int) -> int:
    """The most pages that requests hold at any time from now on if nobody else is admitted.

    Args:
        own_tokens: i64[n], tokens of each request that lie in pages of its own.
        remaining: i64[n], tokens it will still store.
        page_size: tokens.

    Every request gains one token a step until it ends and gives its pages back, so the peak lies just before one of
    them ends.
    """
    order = np.argsort(-remaining, kind="stable")
    own, left = own_tokens[order], remaining[order]
    # When the i-th longest ends, it and the longer ones before it are there, the others are gone. Their tokens bound
    # their pages; only the ends that may be the peak are counted page by page: of all n that would be n * n divisions.
    there = np.arange(1, own.size + 1)
    tokens = own.cumsum() + there * left
    at_least, at_most = -(-tokens // page_size), (tokens + there * (page_size - 1)) // page_size
    ends = np.flatnonzero(at_most >= at_least.max())
    pages = -(-(own + left[ends, None]) // page_size)
    return int(np.where(np.arange(own.size) <= ends[:, None], pages, 0).sum(axis=1).max())
