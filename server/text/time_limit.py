"""An end to work that may loop for ever, in a thread that cannot be killed."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator


class Overtime(BaseException):
    """The work has taken too long. Not an Exception: the work's own handlers must let it pass."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises Overtime in the block once it has run for so long, between two of its Python instructions.

    A single call into C is not interrupted: the exception comes when it returns.
    """
    thread_id, lock, running = threading.get_ident(), threading.Lock(), True

    def interrupt() -> None:
        with lock:
            if running:
                _set_exception(thread_id, Overtime)

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    try:
        timer.start()
        yield
    finally:
        timer.cancel()
        with lock:
            running = False
            _set_exception(thread_id, None)  # one that is on its way finds its block left


def _set_exception(thread_id: int, exception: type[BaseException] | None) -> None:
    value = None if exception is None else ctypes.py_object(exception)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), value)
