"""HTTP between the processes of one server, over Unix sockets in a folder that only their user may enter."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import aiohttp
from yarl import URL

Headers = Sequence[tuple[bytes, bytes]]
BACKLOG = 128
NOT_ADDED = ("accept", "accept-encoding", "content-type", "user-agent")  # aiohttp must not add these header fields
MAX_HEAD = 1 << 16  # bytes of a line or a field of an answer's head


class PrivateCallError(Exception):
    """Another process has not answered. The message names it and the reason."""


@contextlib.asynccontextmanager
async def exchange(
    path: Path, method: str, target: str, *, headers: Headers = (), body: bytes = b""
) -> AsyncIterator[aiohttp.ClientResponse]:
    """Sends a request to the process that listens at `path`, and yields the answer after its head has arrived. The
    connection closes at the end of the context, so the other process notices if the answer is not read to its end.

    Raises PrivateCallError if the process cannot be reached or the answer ends too early.
    """
    session = aiohttp.ClientSession(
        connector=aiohttp.UnixConnector(str(path), force_close=True),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
        auto_decompress=False,
        skip_auto_headers=NOT_ADDED,
        cookie_jar=aiohttp.DummyCookieJar(),
        max_line_size=MAX_HEAD,
        max_field_size=MAX_HEAD,
    )
    fields = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]
    url = URL(f"http://localhost{target}", encoded=True)
    try:
        async with (
            session,
            session.request(method, url, headers=fields, data=body, allow_redirects=False) as answer,
        ):
            yield answer
    except aiohttp.ClientConnectorError as error:
        raise PrivateCallError(f"no process listens at {path.name}: {error.strerror or error}") from error
    except (aiohttp.ClientError, ConnectionError) as error:
        raise PrivateCallError(f"the process at {path.name} has ended: {error}") from error


async def call(path: Path, target: str, body: bytes = b"", *, timeout_s: float | None) -> bytes:
    """Posts `body` and returns the body of the answer. Raises PrivateCallError if the status is not 200, or after
    `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s), exchange(path, "POST", target, body=body) as answer:
            content = await answer.read()
            if answer.status != 200:
                raise PrivateCallError(f"{path.name}{target} was answered {answer.status}: {content[:200]!r}")
            return content
    except TimeoutError as error:
        raise PrivateCallError(f"{path.name}{target} was not answered within {timeout_s:g} s") from error


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
