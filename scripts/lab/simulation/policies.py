"""Admission policies for a comparison with the scheduler's own forecast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from batcher.scheduling.request_state import RequestState


class AdmitIfFree:
    """No forecast: a request is admitted when the pages of its known tokens are free."""

    def finished(self, sequence: RequestState, *, stopped: bool) -> None:
        pass

    def outlook(self, running: Sequence[RequestState], page_size: int) -> AdmitIfFree:
        return self

    def fits(self, sequence: RequestState, num_pages: int) -> bool:
        return True

    def add(self, sequence: RequestState) -> None:
        pass


class Clairvoyant:
    """Knows the length of every output, and admits as many requests as possible without running out of pages.

    Args:
        output_lens: tokens, by request id.
    """

    def __init__(self, output_lens: Mapping[str, int]) -> None:
        self._output_lens = output_lens

    def finished(self, sequence: RequestState, *, stopped: bool) -> None:
        pass

    def outlook(self, running: Sequence[RequestState], page_size: int) -> _ExactOutlook:
        return _ExactOutlook(self._output_lens, list(running), page_size)


class _ExactOutlook:
    def __init__(self, output_lens: Mapping[str, int], sequences: list[RequestState], page_size: int) -> None:
        self._output_lens = output_lens
        self._sequences = sequences
        self._page_size = page_size

    def fits(self, sequence: RequestState, num_pages: int) -> bool:
        everyone = [*self._sequences, sequence]
        left = np.array([min(self._output_lens[s.request_id], s.limit) - s.num_emitted for s in everyone])
        own = np.array([s.num_prompt + s.num_emitted - s.num_hit_pages * self._page_size for s in everyone])
        # Usage only falls when a request ends, so its peak is at the end of some request.
        ends = np.unique(left)[:, None]
        pages = np.where(left >= ends, -(-(own + ends) // self._page_size), 0).sum(axis=1)
        return int(pages.max()) <= num_pages

    def add(self, sequence: RequestState) -> None:
        self._sequences.append(sequence)
