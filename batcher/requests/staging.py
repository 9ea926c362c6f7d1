"""Brings the weights of LoRA adapters to the device on a thread of its own, one adapter after the other.

Reading them may take long, and the engine's steps go on meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import NamedTuple

from batcher.step import Runner


class Staged(NamedTuple):
    """An adapter is on the device, or its weights cannot be read."""

    adapter: int
    error: Exception | None


def stage(runner: Runner, adapter: int) -> Staged:
    """Stages the adapter on this thread. Raises errors that are not of the adapter's files."""
    try:
        runner.stage_adapter(adapter)
    except (ValueError, OSError) as error:
        return Staged(adapter, error)
    return Staged(adapter, None)


class StagingThread:
    """The thread. It starts at the first `ask`.

    Args:
        put: is called on it with the results. An exception is an error that ends the engine, and the thread.
    """

    def __init__(self, runner: Runner, put: Callable[[Staged | Exception], None]) -> None:
        self._runner = runner
        self._put = put
        self._asked: SimpleQueue[int | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def ask(self, adapter: int) -> None:
        """The adapter is to be staged."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="engine-adapters", daemon=True)
            self._thread.start()
        self._asked.put(adapter)

    def close(self) -> None:
        """The thread is to end after the adapter that it is at."""
        self._is_closed = True
        self._asked.put(None)

    def join(self) -> None:
        """Waits until the thread has ended."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while (adapter := self._asked.get()) is not None and not self._is_closed:
            try:
                self._put(stage(self._runner, adapter))
            except Exception as error:
                self._put(error)
                return
