"""The format of log lines in all processes of a server, and a limit on the lines that clients can cause."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from contextvars import ContextVar
from datetime import UTC, datetime

JSON = "json"  # a value of --log-format
INTERVAL_S = 10.0

# The x-request-id of the request that the current task answers; empty if there is none.
current_request_id: ContextVar[str] = ContextVar("current_request_id", default="")

logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it warns of every form that cannot be read


class JsonFormatter(logging.Formatter):
    """Formats a line as one JSON object. `extra={"fields": {...}}` of a logging call adds fields.

    A line that is written while a request is answered has its `request_id`.
    """

    def __init__(self, process: str = "") -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "process": self._process,
            "message": record.getMessage(),
            "request_id": current_request_id.get(),
            "exception": self.formatException(record.exc_info) if record.exc_info else "",
        }
        return json.dumps({name: value for name, value in line.items() if value} | getattr(record, "fields", {}))


def configure_log(level: int | str, log_format: str, *, process: str = "") -> None:
    """Writes all lines of this process to stderr. `process` names it among several HTTP processes."""
    name = f" [{process}]" if process else ""
    text = logging.Formatter(f"%(asctime)s %(levelname)s %(name)s{name}: %(message)s")
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(process) if log_format == JSON else text)
    logging.basicConfig(level=level, handlers=[handler])


def logs_json() -> bool:
    """Whether the log of this process has the format JSON."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)


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
