"""The signals that end a server."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any


class Signals:
    """SIGTERM and SIGINT: the first sets `stop`, the second `hurry`."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if self.stop.is_set():
            self.hurry.set()
        self.stop.set()


async def first_of(*awaited: Coroutine[Any, Any, Any]) -> None:
    """Waits until one of them is done and cancels the others."""
    tasks = [asyncio.create_task(item) for item in awaited]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
