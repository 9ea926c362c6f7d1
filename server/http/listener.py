"""The socket that a server listens on, an address or a path, and what accepts its connections while there is room.
Further connections wait in the system's backlog and are not reset.

Several processes may accept from one socket. Then a process takes one connection at a time, and lets those with fewer
connections go first for TURN_S, so that they share the load.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from server.http.connections import Connections
from server.settings import Settings
from server.shared_counts import Row

MOST_AT_ONCE = 64  # connections accepted in one turn of the event loop
MOST_LATE = 4  # that a process accepts after it has waited in vain for one with fewer connections
TURN_S = 0.005  # for a process with fewer connections to accept one, before this process does
LOOKS = 5  # in TURN_S, whether this process now has the fewest: others may have accepted meanwhile
RETRY_S = 0.5  # after the system had no descriptor or memory for a connection
GONE = (errno.ECONNABORTED, errno.EPROTO, errno.EPERM)  # one client's errors; the next connection may be accepted
BACKLOG = 2048  # connections that the system queues until they are accepted


class Listener:
    """Accepts connections, each with a new protocol from `create`. It has the two methods that uvicorn calls."""

    def __init__(
        self, listener: socket.socket, connections: Connections, create: Callable[[], asyncio.Protocol]
    ) -> None:
        self._socket = listener
        self._socket.setblocking(False)
        self._connections = connections
        self._create = create
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False
        connections.on_room = self._resume
        self._resume()

    def close(self) -> None:
        self._is_closed = True
        self._loop.remove_reader(self._socket)

    async def wait_closed(self) -> None:
        """Waits until the last connection has been accepted."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _resume(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        neighbours = self._connections.neighbours
        if neighbours is None:
            self._take(MOST_AT_ONCE)
        elif neighbours.is_first:
            self._take(1)
        else:
            self._loop.remove_reader(self._socket)
            self._wait(neighbours, LOOKS)

    def _wait(self, neighbours: Row, looks: int) -> None:
        self._loop.call_later(TURN_S / LOOKS, self._look, neighbours, looks - 1)

    def _look(self, neighbours: Row, looks_left: int) -> None:
        if self._is_closed:
            return
        if looks_left and not neighbours.is_first:
            self._wait(neighbours, looks_left)
        else:
            self._resume()
            self._take(1 if neighbours.is_first else MOST_LATE)

    def _take(self, most: int) -> None:
        for _ in range(most):
            if not self._connections.has_room:
                self._loop.remove_reader(self._socket)  # `on_room` resumes
                return
            try:
                connection, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in GONE:
                    continue
                self._connections.log.warning("no connection can be accepted: %s", error)
                self._loop.remove_reader(self._socket)
                self._loop.call_later(RETRY_S, self._resume)
                return
            self._connections.enter()
            task = self._loop.create_task(self._connect(connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _connect(self, connection: socket.socket) -> None:
        try:
            connection.setblocking(False)
            await self._loop.connect_accepted_socket(self._create, connection)
        except OSError as error:  # the client has already closed the connection
            connection.close()
            self._connections.leave()
            self._connections.log.warning("a connection was lost before its first byte: %s", error)


def bind(settings: Settings) -> socket.socket:
    """A bound socket that does not listen yet. An old socket file at which no process listens is replaced. Raises
    OSError, with the flags to change, if the address is taken."""
    path = settings.uds
    with address_in_error(settings), contextlib.ExitStack() as undo:
        if path is not None:
            listener = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            if path.is_socket() and listener.connect_ex(str(path)) == errno.ECONNREFUSED:
                path.unlink()
            listener.bind(str(path))
        else:
            addresses = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)
            family, kind, protocol, _, address = addresses[0]
            listener = undo.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        undo.pop_all()
        return listener


@contextlib.contextmanager
def removed(path: Path | None) -> Iterator[None]:
    """Removes the socket's file at the end."""
    try:
        yield
    finally:
        if path is not None:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def address_in_error(settings: Settings) -> Iterator[None]:
    """Adds the address and the flags to an OSError."""
    try:
        yield
    except OSError as error:
        where = f"{settings.host}:{settings.port}" if settings.uds is None else str(settings.uds)
        flags = "--port or --host" if settings.uds is None else "--uds"
        message = f"cannot listen on {where}: {error.strerror or error}; choose another {flags}"
        raise OSError(error.errno, message) from error


def url_of(listener: socket.socket, settings: Settings) -> str:
    """The server's URL, with the port that the system has chosen."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"{'http' if settings.tls is None else 'https'}://{f'[{host}]' if ':' in host else host}:{port}"
