"""How much memory the running requests will still need: the look-ahead of admission.

A request with `ignore_eos` and no stop ids goes to its limit for certain. Any other may, but few do: a chat without
`max_tokens` could fill the context and stops after a paragraph. For those the forecast is the share of their limit that
finished requests used, a moving average; where it was too low, a preemption raises it at once.
"""

from __future__ import annotations

from math import ceil

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

    def remaining(self, sequence: Sequence) -> int:
        """Tokens that it is expected to emit in steps yet to come."""
        left = sequence.limit - sequence.num_emitted
        return ceil(self.share * left) if sequence.stop_ids else left


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
    at_the_end = -(-(own + left) // page_size)
    if own.size > 1 and left[0] != left[-1]:
        # Row i: when the i-th longest ends, it and the longer ones before it are there, the others are gone.
        pages = np.tril(-(-(own[None, :] + left[:, None]) // page_size))
        return int(pages.sum(axis=1).max())
    return int(at_the_end.sum())
