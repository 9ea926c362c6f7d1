"""All connections of the server: how many there may be, which of them wait for a request, how long each may take."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from server.http.throttled_log import ThrottledLog

logger = logging.getLogger("pallas_serve")

LEAST_WAIT_S = 0.1  # for the first request of a new connection: its bytes may have come and be unread


@dataclass(frozen=True, kw_only=True, slots=True)
class ConnectionLimits:
    """How many connections there may be, and how long they may take, in seconds."""

    max_connections: int
    head_timeout_s: float
    body_timeout_s: float
    idle_timeout_s: float
    send_timeout_s: float


class Connection(Protocol):
    """What this file asks of a connection."""

    def close_waiting(self) -> None:
        """Closes one on which no request has begun, and dismisses it."""


class Connections:
    """The count of open connections, shared by the listener and by the connections themselves.

    Up to `max_connections` are served. When there are more, the one that has waited longest for its next request is
    closed; where none has waited for LEAST_WAIT_S, the new one is turned away. Up to `num_refusals` connections may be
    open beyond the limit, on their way out; then the listener accepts no more until one of them has gone.
    """

    def __init__(self, limits: ConnectionLimits, num_refusals: int) -> None:
        self.limits = limits
        self.draining = False
        self.log = ThrottledLog(logger)
        self.on_room: Callable[[], None] | None = None  # called when one has gone while there was no room
        self._most_open = limits.max_connections + num_refusals
        self._num_open = 0
        self._served: set[Connection] = set()
        self._waiting: dict[Connection, float] = {}  # since when, the longest first; all of them are served ones

    @property
    def has_room(self) -> bool:
        """Whether one more may be accepted, be it to be turned away."""
        return self._num_open < self._most_open

    def enter(self) -> None:
        """A connection was accepted."""
        self._num_open += 1

    def leave(self) -> None:
        """It has gone."""
        had_room = self.has_room
        self._num_open -= 1
        if not had_room and self.on_room is not None:
            self.on_room()

    def admit(self, connection: Connection) -> bool:
        """Whether the connection is served. If not, it must be turned away."""
        if len(self._served) >= self.limits.max_connections:
            longest, since = next(iter(self._waiting.items()), (None, 0.0))
            if longest is None or time.monotonic() < since + LEAST_WAIT_S:
                message = "all %d connections are in use: a new one is answered 503 (--max-connections)"
                self.log.warning(message, self.limits.max_connections)
                return False
            longest.close_waiting()
        self._served.add(connection)
        return True

    def dismiss(self, connection: Connection) -> None:
        """It is served no more, if it was."""
        self._served.discard(connection)
        self._waiting.pop(connection, None)

    def begin_wait(self, connection: Connection) -> None:
        self._waiting[connection] = time.monotonic()

    def end_wait(self, connection: Connection) -> None:
        self._waiting.pop(connection, None)
