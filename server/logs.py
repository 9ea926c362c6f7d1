"""The format of log lines in all processes that serve HTTP, and a limit on the lines that clients can cause."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
FORMAT_OF_SEVERAL = "%(asctime)s %(levelname)s %(name)s [http {number}]: %(message)s"
INTERVAL_S = 10.0

logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it warns of every form that cannot be read


class ThrottledLog:
    """Logs each kind of line at most once every `interval_s` seconds. Lines are of one kind if they have the same
    message without its arguments."""

    def __init__(
        self, logger: logging.Logger, *, interval_s: float = INTERVAL_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._clock = clock
        self._next: dict[str, float] = {}  # by message: when the next line of that kind may be written
        self._num_left_out: dict[str, int] = {}

    def warning(self, message: str, *args: object) -> None:
        self._log(logging.WARNING, message, args)

    def exception(self, message: str, *args: object) -> None:
        """Logs an error with the traceback of the exception that is being handled."""
        self._log(logging.ERROR, message, args, exc_info=True)

    def _log(self, level: int, message: str, args: tuple[object, ...], *, exc_info: bool = False) -> None:
        now = self._clock()
        if now < self._next.get(message, now):
            self._num_left_out[message] = self._num_left_out.get(message, 0) + 1
            return
        self._next[message] = now + self._interval_s
        num_left_out = self._num_left_out.pop(message, 0)
        note = f" ({num_left_out} more like it since the last such line)" if num_left_out else ""
        self._logger.log(level, message + note, *args, exc_info=exc_info)
