"""A time limit for work that may loop forever in a thread. A thread cannot be killed."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator


class Overtime(BaseException):
    """The work has taken too long. It is not an `Exception`, so `except Exception` in the work does not catch it."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises Overtime in the block after `seconds`, between two Python instructions.

    A call into C is not interrupted: the exception is raised when the call returns.
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
            _set_exception(thread_id, None)  # drops an exception that is still pending


def _set_exception(thread_id: int, exception: type[BaseException] | None) -> None:
    value = None if exception is None else ctypes.py_object(exception)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), value)
