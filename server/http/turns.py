"""Cuts long work on the event loop into pieces, so that each turn of the loop does a few milliseconds of it.

A thread does not help with work in pure Python, because the thread and the loop compete for the interpreter's lock.
Here the loop runs its other tasks between two pieces. Only one of the long tasks runs in a turn, so many of them delay
a stream no more than one does.

A thousand tasks that wait for one result would also take long if all of them continued in the same turn.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any

TURN_S = 0.002
BLOCK_BYTES = 256 * 1024
MOST_IN_A_TURN = 16  # tasks that continue in a turn: some milliseconds, if each refuses or begins to answer a request


class Turns:
    """Encodes long answers in short turns of the event loop, one answer at a time."""

    def __init__(self) -> None:
        self._one_at_a_time = asyncio.Lock()

    async def blocks(self, pieces: Iterator[bytes]) -> AsyncIterator[tuple[bytes, bool]]:
        """Yields (the joined pieces of one turn, whether more follow). The first turn is immediate."""
        block, more = _block(pieces)
        while more:
            yield block, True
            async with self._one_at_a_time:
                await asyncio.sleep(0)  # the loop runs its other tasks first
                block, more = _block(pieces)
        yield block, False


class SharedWork[T]:
    """Work that is done once for all tasks that wait for it. At most MOST_IN_A_TURN of them continue in each turn, in
    the order in which they came."""

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._task = asyncio.create_task(work)
        self._task.add_done_callback(lambda _: self._release())

    async def result(self) -> T:
        """Waits for the result of the work. Raises the error of the work. The work goes on if the caller is
        cancelled."""
        if not self._task.done():
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            await turn
        return self._task.result()

    def _release(self) -> None:
        for _ in range(min(MOST_IN_A_TURN, len(self._waiting))):
            turn = self._waiting.popleft()
            if not turn.done():  # else its task was cancelled
                turn.set_result(None)
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._release)


def _block(pieces: Iterator[bytes]) -> tuple[bytes, bool]:
    made: list[bytes] = []
    num_bytes = 0
    deadline = time.perf_counter() + TURN_S
    for piece in pieces:
        made.append(piece)
        num_bytes += len(piece)
        if num_bytes >= BLOCK_BYTES or time.perf_counter() >= deadline:
            return b"".join(made), True
    return b"".join(made), False
