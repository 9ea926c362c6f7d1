"""Threads for long work on clients' input and answers, which would block the event loop.

Three others use them: the decoding of a body (`request.body`), the encoding of its prompts (`request.prompts`) and the
scores of an answer (`routes.embeddings`). Chat templates have threads of their own (`server.text.template_runner`), and
so has the database.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial

LONG_WORK = 4096  # characters or tokens: about a millisecond of work; longer work is done in a thread
NUM_THREADS = 4  # with more threads the event loop would wait longer for the interpreter's lock
LONG_S = 0.002  # the rest of an answer that takes longer to encode is encoded in a thread
BLOCK_BYTES = 256 * 1024

_threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="worker")


async def in_thread[**P, R](size: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Calls the function in a thread. Its work grows with `size`, in characters or tokens. Short work is done on the
    event loop."""
    if size < LONG_WORK:
        return function(*args, **kwargs)
    own = copy_context()  # of the request
    return await asyncio.get_running_loop().run_in_executor(_threads, partial(own.run, function, *args, **kwargs))


async def blocks(pieces: Iterator[bytes]) -> AsyncIterator[tuple[bytes, bool]]:
    """Yields (joined pieces, whether more follow). A short answer is one block, which is made on the event loop. An
    answer of one piece is sent whole, however busy the process is."""
    deadline = time.perf_counter() + LONG_S
    block, more = _block(pieces, lambda: time.perf_counter() >= deadline)
    while more:
        yield block, True
        block, more = await in_thread(LONG_WORK, _block, pieces)
    yield block, False


def _block(pieces: Iterator[bytes], is_late: Callable[[], bool] = lambda: False) -> tuple[bytes, bool]:
    made: list[bytes] = []
    num_bytes = 0
    for piece in pieces:
        made.append(piece)
        num_bytes += len(piece)
        if num_bytes >= BLOCK_BYTES or (len(made) > 1 and is_late()):
            return b"".join(made), True
    return b"".join(made), False
