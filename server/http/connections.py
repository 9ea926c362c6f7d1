"""All connections of the server: their limits, and which of them wait for a request."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from server.http.throttled_log import ThrottledLog

logger = logging.getLogger("pallas_serve")

LEAST_WAIT_S = 0.1  # a shorter wait is not cut off: a request may have arrived but not been read


@dataclass(frozen=True, kw_only=True, slots=True)
class ConnectionLimits:
    """The maximum number of connections, and their timeouts in seconds."""

    max_connections: int
    head_timeout_s: float
    body_timeout_s: float
    idle_timeout_s: float
    send_timeout_s: float


class Neighbours(Protocol):
    """The other processes that accept connections from the same socket."""

    def set_connections(self, number: int) -> None:
        """This process serves so many."""

    @property
    def connections(self) -> int:
        """Those of all processes."""

    @property
    def is_first(self) -> bool:
        """Whether no other process has fewer."""


class Connection(Protocol):
    """The interface of a connection for `Connections`."""

    def close_waiting(self) -> None:
        """Closes a connection on which no request has begun, and dismisses it."""


class Connections:
    """The count of open connections, shared by the listener and by the connections themselves.

    Up to `max_connections` are served. For one more, the connection that has waited longest for its next request is
    closed. If none has waited for LEAST_WAIT_S, the new connection is turned away. Up to `num_refusals` connections
    beyond the limit may be open while they are turned away. Then the listener accepts none until one has closed.

    With `neighbours`, the limit holds for all processes together if `is_total`, and else for each.
    """

    def __init__(
        self,
        limits: ConnectionLimits,
        num_refusals: int,
        neighbours: Neighbours | None = None,
        *,
        is_total: bool = False,
    ) -> None:
        self.neighbours = neighbours
        self._is_total = is_total and neighbours is not None
        self.limits = limits
        self.draining = False
        self.log = ThrottledLog(logger)
        self.on_room: Callable[[], None] | None = None  # called when a connection closes while there is no room
        self._most_open = limits.max_connections + num_refusals
        self._num_open = 0
        self._served: set[Connection] = set()
        self._waiting: dict[Connection, float] = {}  # start of the wait, oldest first; all are in `_served`

    @property
    def has_room(self) -> bool:
        """Whether one more connection may be accepted, to be served or turned away."""
        return self._num_open < self._most_open

    def enter(self) -> None:
        """A connection was accepted."""
        self._num_open += 1

    def leave(self) -> None:
        """An accepted connection has closed."""
        had_room = self.has_room
        self._num_open -= 1
        if not had_room and self.on_room is not None:
            self.on_room()

    def admit(self, connection: Connection) -> bool:
        """Serves the connection if there is room, and returns True. Otherwise the caller must turn it away."""
        if self._num_served >= self.limits.max_connections:
            longest, since = next(iter(self._waiting.items()), (None, 0.0))
            if longest is None or time.monotonic() < since + LEAST_WAIT_S:
                message = "all %d connections are in use: a new one is answered 503 (--max-connections)"
                self.log.warning(message, self.limits.max_connections)
                return False
            longest.close_waiting()
        self._served.add(connection)
        self._tell()
        return True

    @property
    def _num_served(self) -> int:
        return self.neighbours.connections if self._is_total and self.neighbours is not None else len(self._served)

    def _tell(self) -> None:
        if self.neighbours is not None:
            self.neighbours.set_connections(len(self._served))

    def dismiss(self, connection: Connection) -> None:
        """The connection is no longer served. Nothing happens if it never was."""
        self._served.discard(connection)
        self._waiting.pop(connection, None)
        self._tell()

    def begin_wait(self, connection: Connection) -> None:
        """Notes that a connection waits for a request, from now on."""
        self._waiting[connection] = time.monotonic()

    def end_wait(self, connection: Connection) -> None:
        """Notes that a connection does not wait any more."""
        self._waiting.pop(connection, None)
