"""What ends a server: signals, or another process that has had them."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any


class Ending:
    """What ends a server: the first request to end sets `stop`, the second `hurry`."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()

    def ask(self) -> None:
        if self.stop.is_set():
            self.hurry.set()
        self.stop.set()


class Signals(Ending):
    """SIGTERM and SIGINT ask for the end."""

    def __init__(self) -> None:
        super().__init__()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.ask)


async def first_of(*awaited: Coroutine[Any, Any, Any]) -> None:
    """Waits until one of them is done and cancels the others."""
    tasks = [asyncio.create_task(item) for item in awaited]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
