"""Threads for work on clients' input that would block the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

LONG_WORK = 4096  # characters or tokens: about a millisecond of work; longer work is done in a thread
NUM_THREADS = 4  # with more threads the event loop would wait longer for the interpreter's lock


class WorkerThreads:
    """Threads for long work, such as encoding a long prompt."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="worker")

    async def in_thread[**P, R](self, size: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the function in a thread. Its work grows with `size`, in characters or tokens. Short work is done on
        the event loop."""
        if size < LONG_WORK:
            return function(*args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(function, *args, **kwargs))
