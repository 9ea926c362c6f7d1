"""All connections of the server: their limits in number, bytes and time, and which of them wait for a request."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from server.http.descriptors import NUM_REFUSALS
from server.logs import ThrottledLog
from server.settings import Settings
from server.shared_counts import Row

logger = logging.getLogger("pallas_serve")

LEAST_WAIT_S = 0.1  # a shorter wait is not cut off: a request may have arrived but not been read
MIN_BODY_RATE = 1024  # bytes a second


class Connection(Protocol):
    """The interface of a connection for `Connections`."""

    def close_waiting(self) -> None:
        """Closes a connection on which no request has begun, and dismisses it."""


class Reader(Protocol):
    """The interface of a connection for `UnfinishedRequests`."""

    def refuse_body(self) -> None:
        """Answers 503 instead of reading on."""


class UnfinishedRequests:
    """The bytes of requests that are still being read or decoded: all connections together hold up to `most_bytes`.

    Beyond that the longest request that is being read is refused: short ones are served while others fill the memory.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._num_bytes = 0
        self._reading: dict[Reader, int] = {}
        self._decoding: dict[Reader, int] = {}

    def read(self, reader: Reader, num_bytes: int) -> None:
        """Counts bytes of a request that is not complete. May refuse it or another one."""
        self._reading[reader] = self._reading.get(reader, 0) + num_bytes
        self._num_bytes += num_bytes
        while self._num_bytes > self._most_bytes and self._reading:
            longest = max(self._reading, key=self._reading.__getitem__)
            self.end(longest)
            longest.refuse_body()

    def complete(self, reader: Reader) -> None:
        """All of the request has been read. The application decodes it."""
        if reader in self._reading:
            self._decoding[reader] = self._reading.pop(reader)

    def end(self, reader: Reader) -> None:
        """The request's bytes are not held any more. Nothing happens if none were."""
        self._num_bytes -= self._reading.pop(reader, 0) + self._decoding.pop(reader, 0)


class Connections:
    """The count of open connections, shared by the listener and by the connections themselves.

    Up to `max_connections` are served. For one more, the connection that has waited longest for its next request is
    closed. If none has waited for LEAST_WAIT_S, the new connection is turned away. Up to NUM_REFUSALS connections
    beyond the limit may be open while they are turned away. Then the listener accepts none until one has closed.

    With `neighbours`, the row of this process among those that accept from the same socket, the limit holds for all
    processes together if the settings name it, and else for each.
    """

    def __init__(self, settings: Settings, max_connections: int, neighbours: Row | None = None) -> None:
        self.neighbours = neighbours
        self.settings = settings
        self.max_connections = max_connections
        self.unfinished = UnfinishedRequests(settings.max_body_memory_mib * 2**20)
        self.draining = False
        self.log = ThrottledLog(logger)
        self.on_room: Callable[[], None] | None = None  # called when a connection closes while there is no room
        self._most_open = max_connections + NUM_REFUSALS
        self._num_open = 0
        self._served: set[Connection] = set()
        self._waiting: dict[Connection, float] = {}  # start of the wait, oldest first; all are in `_served`

    @property
    def has_room(self) -> bool:
        """Whether one more connection may be accepted, to be served or turned away."""
        return self._num_open < self._most_open

    def enter(self) -> None:
        self._num_open += 1

    def leave(self) -> None:
        had_room = self.has_room
        self._num_open -= 1
        if not had_room and self.on_room is not None:
            self.on_room()

    def admit(self, connection: Connection) -> bool:
        """Serves the connection if there is room, and returns True. Otherwise the caller must turn it away."""
        if self._num_served >= self.max_connections:
            longest, since = next(iter(self._waiting.items()), (None, 0.0))
            if longest is None or time.monotonic() < since + LEAST_WAIT_S:
                message = "all %d connections are in use: a new one is answered 503 (--max-connections)"
                self.log.warning(message, self.max_connections)
                return False
            longest.close_waiting()
        self._served.add(connection)
        self._tell()
        return True

    @property
    def _num_served(self) -> int:
        if self.neighbours is None or self.settings.max_connections is None:
            return len(self._served)
        return self.neighbours.connections

    def _tell(self) -> None:
        if self.neighbours is not None:
            self.neighbours.set_connections(len(self._served))

    def dismiss(self, connection: Connection) -> None:
        """The connection is no longer served. Nothing happens if it never was."""
        self._served.discard(connection)
        self._waiting.pop(connection, None)
        self._tell()

    def begin_wait(self, connection: Connection) -> None:
        self._waiting[connection] = time.monotonic()

    def end_wait(self, connection: Connection) -> None:
        self._waiting.pop(connection, None)


class BodyPace:
    """Within `timeout_s`, as many bytes must come as at MIN_BODY_RATE. Then the time begins again: bytes that came
    faster before earn no time."""

    def __init__(self, timeout_s: float, now: float) -> None:
        self._timeout_s = timeout_s
        self._since = now
        self._missing = timeout_s * MIN_BODY_RATE

    def on_bytes(self, num_bytes: int, now: float) -> None:
        self._missing -= num_bytes
        if self._missing <= 0:
            self.restart(now)

    def restart(self, now: float) -> None:
        self._since = now
        self._missing = self._timeout_s * MIN_BODY_RATE

    def left_s(self, now: float) -> float:
        """The time left for the bytes that are missing."""
        return self._since + self._timeout_s - now


class UnreadWatch:
    """The number of bytes that a client has not read must change within `timeout_s`."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._num_bytes = 0
        self._since = 0.0

    def is_stuck(self, num_bytes: int, now: float) -> bool:
        """Whether the number of unread bytes, `num_bytes`, has been the same in all calls for `timeout_s`."""
        if not num_bytes or num_bytes != self._num_bytes:
            self._num_bytes, self._since = num_bytes, now
        return now - self._since >= self._timeout_s
