"""HTTP between the processes of one server, over Unix sockets in a folder that only their user may enter."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import httptools

Headers = Sequence[tuple[bytes, bytes]]
READ_BYTES = 1 << 16
BACKLOG = 128


class PrivateCallError(Exception):
    """The other process has not answered. The message names it and says why."""


class PrivateAnswer:
    """An answer whose head has come."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.status = 0  # its head has not come
        self._reader = reader
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: list[bytes] = []
        self._is_complete = False

    # called by the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, piece: bytes) -> None:
        self._pieces.append(piece)

    def on_message_complete(self) -> None:
        self._is_complete = True

    async def read_head(self) -> None:
        while not self.status:
            await self._read()

    async def body(self) -> AsyncIterator[bytes]:
        """The body's pieces, as they come. Raises PrivateCallError if it ends too early."""
        while True:
            pieces, self._pieces = self._pieces, []
            for piece in pieces:
                yield piece
            if self._is_complete:
                return
            await self._read()

    async def _read(self) -> None:
        data = await self._reader.read(READ_BYTES)
        if not data:
            raise PrivateCallError("the process has closed its connection before the end of its answer")
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise PrivateCallError(f"the process has sent no HTTP: {error}") from error


@contextlib.asynccontextmanager
async def exchange(
    path: Path, method: str, target: str, *, headers: Headers = (), body: bytes = b""
) -> AsyncIterator[PrivateAnswer]:
    """Sends a request to the process that listens at `path`. The connection closes with the context, and by that the
    other process learns that the answer is not read on. Raises PrivateCallError."""
    try:
        reader, writer = await asyncio.open_unix_connection(str(path), limit=READ_BYTES)
    except OSError as error:
        raise PrivateCallError(f"no process listens at {path.name}: {error.strerror or error}") from error
    try:
        fields = [(b"host", b"localhost"), (b"connection", b"close"), (b"content-length", b"%d" % len(body)), *headers]
        head = b"".join(name + b": " + value + b"\r\n" for name, value in fields)
        writer.write(f"{method} {target} HTTP/1.1\r\n".encode() + head + b"\r\n" + body)
        await writer.drain()
        answer = PrivateAnswer(reader)
        await answer.read_head()
        yield answer
    except ConnectionError as error:
        raise PrivateCallError(f"the process at {path.name} has ended") from error
    finally:
        writer.close()


async def call(path: Path, target: str, body: bytes = b"", *, timeout_s: float | None) -> bytes:
    """Posts `body` and returns that of the answer, which must have status 200. Raises PrivateCallError."""
    try:
        async with asyncio.timeout(timeout_s), exchange(path, "POST", target, body=body) as answer:
            content = b"".join([piece async for piece in answer.body()])
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
