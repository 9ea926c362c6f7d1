"""Computes the masks of requests with grammars, on separate threads, while the device runs.

A matcher releases the GIL while it works. Matchers whose last mask was quick are computed together in a few tasks, so
a step of many rows costs little more than a step of few rows. A matcher whose last mask was slow, or whose grammar is
not compiled yet, gets its own task on other threads: a costly grammar delays only other costly ones.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from batcher.grammar import Permit
from batcher.requests.deep_threads import deep_threads
from batcher.scheduling.request_state import RequestState

SLOW_S = 0.002  # seconds of CPU time for one mask; most masks take 0.0001 s
MAX_QUICK_THREADS = 4
NUM_SLOW_THREADS = 2


class Ask(NamedTuple):
    """A sequence whose next mask is wanted, and the tokens drawn since its last one."""

    sequence: RequestState
    tokens: tuple[int, ...]


class MaskResult(NamedTuple):
    """The next permit of a sequence, or the exception that computing it raised."""

    sequence: RequestState
    permit: Permit | Exception  # GrammarError: the request's own fault
    was_slow: bool


def answer(ask: Ask) -> MaskResult:
    """Computes the mask on this thread."""
    matcher = ask.sequence.matcher
    assert matcher is not None
    started = time.thread_time()  # CPU time: on a busy machine, wall time includes waiting
    permit: Permit | Exception
    try:
        permit = matcher.advance(ask.tokens)
    except Exception as error:  # the engine's thread handles it, as for a failed step
        permit = error
    return MaskResult(ask.sequence, permit, time.thread_time() - started > SLOW_S)


class MaskThreads:
    """The threads that compute masks. They call `on_answers`, and start at the first `ask`."""

    def __init__(self, on_answers: Callable[[list[MaskResult]], None]) -> None:
        self._on_answers = on_answers
        self._num_quick = min(MAX_QUICK_THREADS, os.cpu_count() or 1)
        self._quick: ThreadPoolExecutor | None = None
        self._slow: ThreadPoolExecutor | None = None

    def ask(self, asks: list[Ask]) -> None:
        if self._quick is None or self._slow is None:
            self._quick = deep_threads(self._num_quick, "masks")
            self._slow = deep_threads(NUM_SLOW_THREADS, "slow-masks")
        quick = []
        for one in asks:
            if one.sequence.is_slow_to_mask:
                self._slow.submit(self._run, [one])
            else:
                quick.append(one)
        for start in range(min(self._num_quick, len(quick))):
            self._quick.submit(self._run, quick[start :: self._num_quick])

    def close(self) -> None:
        """Cancels the tasks that have not started, and waits for the others."""
        for pool in (self._quick, self._slow):
            if pool is not None:
                pool.shutdown(cancel_futures=True)

    def _run(self, asks: list[Ask]) -> None:
        self._on_answers([answer(ask) for ask in asks])
