"""Threads for work that may take long, while the engine's steps go on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue


class Worker:
    """Does calls one after the other, on a thread from `start` on. The engine's end does not wait for a stuck one: the
    interpreter does not, either.

    Args:
        name: of the thread.
        on_failure: gets the exception of a call, which ends the thread.
    """

    def __init__(self, name: str, on_failure: Callable[[Exception], object]) -> None:
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self.do = self._calls.put
        self.num_waiting = self._calls.qsize
        self._on_failure = on_failure
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.start = self._thread.start

    def work_here(self, most: int | None = None) -> int:
        """Does up to `most` calls in the caller's thread. Returns their number."""
        num_done = 0
        while num_done != most and not self._calls.empty() and (call := self._calls.get()) is not None:
            call()
            num_done += 1
        return num_done

    def close(self) -> None:
        """Ends the thread after the call that it is at."""
        self._is_closed = True
        self._calls.put(None)

    def join(self) -> None:
        """Waits until the thread has ended."""
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            while (call := self._calls.get()) is not None and not self._is_closed:
                call()
        except Exception as error:
            self._on_failure(error)
