"""The socket that a server listens on: an address, or a path."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator
from pathlib import Path

from server.settings import Settings

BACKLOG = 2048  # connections that the system queues until they are accepted


def bind(settings: Settings) -> socket.socket:
    """A bound socket that does not listen yet. Raises OSError, with the flags to change, if the address is taken."""
    return _bind_address(settings) if settings.uds is None else _bind_path(settings, settings.uds)


def _bind_path(settings: Settings, path: Path) -> socket.socket:
    """A Unix socket. An old socket file at which no process listens is replaced."""
    with address_in_error(settings), contextlib.ExitStack() as undo:
        listener = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        if path.is_socket() and listener.connect_ex(str(path)) == errno.ECONNREFUSED:
            path.unlink()
        listener.bind(str(path))
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


def _bind_address(settings: Settings) -> socket.socket:
    with address_in_error(settings), contextlib.ExitStack() as undo:
        addresses = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = addresses[0]
        listener = undo.enter_context(socket.socket(family, kind, protocol))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        undo.pop_all()
        return listener


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
