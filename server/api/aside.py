"""Work on what clients send, out of the event loop's way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

LONG_WORK = 4096  # characters or tokens from which on work is done in a thread: about a millisecond of it
NUM_THREADS = 4  # more of them would only make the loop wait longer for the interpreter's lock


class Aside:
    """Threads for long work, such as encoding a long prompt."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="aside")

    async def run[**P, R](self, size: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the function. Its work grows with `size`, in characters or tokens: what is short is done at once."""
        if size < LONG_WORK:
            return function(*args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(function, *args, **kwargs))
