"""Long work on the event loop, cut into pieces: each turn of the loop does a few milliseconds of it.

A thread does not help work in pure Python: the thread and the loop compete for the interpreter's lock. Here the loop
runs its other tasks between two pieces. Only one of the long tasks runs in a turn, so many of them delay a stream no
more than one does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator

TURN_S = 0.002
BLOCK_BYTES = 256 * 1024


class Turns:
    """Makes long answers in short turns of the event loop, one answer at a time."""

    def __init__(self) -> None:
        self._one_at_a_time = asyncio.Lock()

    async def blocks(
        self, pieces: Iterator[bytes], check: Callable[[], None] = lambda: None
    ) -> AsyncIterator[tuple[bytes, bool]]:
        """Yields (the joined pieces of one turn, whether more follow). The first turn is immediate.

        `check` is called before each later turn. It raises if the rest is not wanted.
        """
        block, more = _block(pieces)
        while more:
            yield block, True
            async with self._one_at_a_time:
                await asyncio.sleep(0)  # the loop runs its other tasks first
                check()
                block, more = _block(pieces)
        yield block, False


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
