"""Computes the masks of requests with grammars, on threads of their own, while the device runs.

A matcher works outside of the interpreter's lock. Those that were quick the last time share a few tasks, so that a step
of many rows costs little more than one of few. A matcher that was slow, or has its grammar to compile, gets a task of
its own on other threads: a costly grammar holds up nobody but others of its kind.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from batcher.deep_threads import deep_threads
from batcher.grammar import Permit
from batcher.sequence import Sequence

SLOW_S = 0.002  # of a thread's time, for one mask; most take a tenth of a millisecond
MAX_QUICK_THREADS = 4
NUM_SLOW_THREADS = 2


class Ask(NamedTuple):
    """A sequence whose next mask is wanted, and the tokens drawn since its last one."""

    sequence: Sequence
    tokens: tuple[int, ...]


class Answer(NamedTuple):
    """What may come next in a sequence, or why that cannot be said."""

    sequence: Sequence
    permit: Permit | Exception  # GrammarError: of the request's own making
    was_slow: bool


def answer(ask: Ask) -> Answer:
    """Blocks until the mask is there."""
    matcher = ask.sequence.matcher
    assert matcher is not None
    started = time.thread_time()  # of its own work: on a busy machine everybody waits
    permit: Permit | Exception
    try:
        permit = matcher.advance(ask.tokens)
    except Exception as error:  # the engine's thread judges it, as with a failed step
        permit = error
    return Answer(ask.sequence, permit, time.thread_time() - started > SLOW_S)


class MaskThreads:
    """`on_answers` is called on its threads. They start with the first ask."""

    def __init__(self, on_answers: Callable[[list[Answer]], None]) -> None:
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
        """Drops what has not begun, and waits for what has."""
        for pool in (self._quick, self._slow):
            if pool is not None:
                pool.shutdown(cancel_futures=True)

    def _run(self, asks: list[Ask]) -> None:
        self._on_answers([answer(ask) for ask in asks])
