"""Other policies, for a comparison with the scheduler's own: of admission, and of the tokens of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from batcher.core import EngineCore
from batcher.scheduling.request_state import RequestState
from batcher.scheduling.scheduler import Scheduler
from scripts.lab.simulation.machine import Result


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


class PrefillPressure:
    """P-PAS, vLLM's RFC 52906: a step has the smaller of two budgets while a request decodes and two or more prompts
    are computed or wait."""

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most

    def __call__(self, core: EngineCore, result: Result) -> None:
        scheduler = core.scheduler
        num_decodes = sum(seq.decoding for seq in scheduler.running)
        num_prompts = len(scheduler.running) - num_decodes + scheduler.num_waiting
        _set_budget(scheduler, self._least if num_decodes and num_prompts >= 2 else self._most)


class Feedback:
    """A budget that follows the measured pauses: a tenth less after one that is longer than the limit, and 2% more
    after others.

    Args:
        itl_s: the limit.
    """

    def __init__(self, itl_s: float, least: int, most: int) -> None:
        self._itl_s, self._least, self._most = itl_s, least, most
        self._budget, self._num_seen = float(most), 0

    def __call__(self, core: EngineCore, result: Result) -> None:
        if len(result.itl) > self._num_seen:
            factor = 0.9 if max(result.itl[self._num_seen :]) > self._itl_s else 1.02
            self._budget = min(max(self._budget * factor, self._least), self._most)
            self._num_seen = len(result.itl)
        _set_budget(core.scheduler, int(self._budget))


def _set_budget(scheduler: Scheduler, tokens: int) -> None:
    """The next step has at most so many tokens: at least one for each row, and one of a prompt."""
    scheduler.token_budget = max(tokens, len(scheduler.running) + 1)
