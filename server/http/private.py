"""HTTP between the processes of one server, over Unix sockets in a folder that only their user may enter."""

from __future__ import annotations

import socket
from pathlib import Path

import aiohttp

BACKLOG = 128


class PrivateCallError(Exception):
    """Another process has not answered. The message names it and the reason."""


async def call(path: Path, target: str, body: bytes = b"", *, timeout_s: float | None) -> bytes:
    """Posts `body` to the process that listens at `path` and returns the body of the answer. Raises PrivateCallError if
    the process cannot be reached or ends, if the status is not 200, or after `timeout_s`."""
    timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=None)
    connector = aiohttp.UnixConnector(str(path), force_close=True)
    try:
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
            session.post(f"http://localhost{target}", data=body) as answer,
        ):
            content = await answer.read()
            if answer.status != 200:
                raise PrivateCallError(f"{path.name}{target} was answered {answer.status}: {content[:200]!r}")
            return content
    except TimeoutError as error:
        raise PrivateCallError(f"{path.name}{target} was not answered within {timeout_s:g} s") from error
    except aiohttp.ClientConnectorError as error:
        raise PrivateCallError(f"no process listens at {path.name}: {error.strerror or error}") from error
    except (aiohttp.ClientError, ConnectionError) as error:
        raise PrivateCallError(f"the process at {path.name} has ended: {error}") from error


def private_listener(path: Path) -> socket.socket:
    """A socket that listens at `path`."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
