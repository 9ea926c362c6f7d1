"""The socket that a server listens on: an address or a path."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator
from pathlib import Path

from server.settings import Settings

BACKLOG = 2048  # connections that the system queues until they are accepted


def bind(settings: Settings) -> socket.socket:
    """A bound socket that does not listen yet. An old socket file at which no process listens is replaced.

    Raises OSError, which names the flags to change, if the address is taken.
    """
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
            if settings.api_server_count > 1:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind(address)
        undo.pop_all()
        return listener


def listener_beside(bound: socket.socket) -> socket.socket:
    """Another socket at the address of `bound`, for this process only. It does not listen yet.

    The system distributes connections among all sockets that listen at the address. A Unix socket does not allow this,
    so `bound` itself is returned. Raises OSError if the address is taken.
    """
    if bound.family == socket.AF_UNIX:
        return bound
    listener = socket.socket(bound.family, bound.type, bound.proto)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind(bound.getsockname())
    return listener


@contextlib.contextmanager
def removed(path: Path | None) -> Iterator[None]:
    """Removes the socket's file at the end of the context."""
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
    """The server's URL, with the port of the bound socket."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"{'http' if settings.tls is None else 'https'}://{f'[{host}]' if ':' in host else host}:{port}"
