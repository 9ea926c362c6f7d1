"""The events that end a server: signals, or the request of another process."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any


class Shutdown:
    """The end of a server. The first call of `ask` sets `stop`, and the second one `hurry`."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()

    def ask(self) -> None:
        if self.stop.is_set():
            self.hurry.set()
        self.stop.set()


class Signals(Shutdown):
    """An `Shutdown` that SIGTERM and SIGINT ask for."""

    def __init__(self) -> None:
        super().__init__()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.ask)


async def first_of(*awaited: Coroutine[Any, Any, Any]) -> None:
    """Waits until one of the coroutines is done, and cancels the others."""
    tasks = [asyncio.create_task(item) for item in awaited]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
