"""The server under attack, and requests to it as bytes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

PATIENCE_S = 60.0  # for one answer


@dataclass(frozen=True, kw_only=True)
class Victim:
    """The server under attack."""

    host: str
    port: int
    events_port: int  # of the events for routers, which needs no key
    model: str
    pid: int  # of the process that was started
    key: str  # the API key of the attackers
    other_key: str  # the API key of ordinary clients

    def head(self, method: str, path: str, *lines: str, key: str | None = None) -> bytes:
        """The head of a request, with `lines` and an API key, by default the attackers'."""
        first = (f"{method} {path} HTTP/1.1", "Host: a", f"Authorization: Bearer {key or self.key}")
        return "\r\n".join([*first, *lines, "", ""]).encode()

    def post(self, path: str, body: bytes, *lines: str, key: str | None = None) -> bytes:
        """A request with a body; `lines` are further ones of its head."""
        kind = ("Content-Type: application/json", f"Content-Length: {len(body)}")
        return self.head("POST", path, *kind, *lines, key=key) + body


@contextlib.asynccontextmanager
async def connected(victim: Victim) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A raw connection. It is aborted at the end."""
    reader, writer = await asyncio.open_connection(victim.host, victim.port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def answered(victim: Victim, request: bytes) -> tuple[int, bytes]:
    """The status and the body of the answer. The status is 0 if the connection is closed without one, and the body is
    empty if it has events or is cut."""
    async with connected(victim) as (reader, writer):
        with contextlib.suppress(ConnectionError):
            writer.write(request)
            await writer.drain()
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
        except (asyncio.IncompleteReadError, ConnectionError):
            return 0, b""
        body = b""
        for line in head.lower().split(b"\r\n"):
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                if line.startswith(b"content-length:"):
                    body = await asyncio.wait_for(reader.readexactly(int(line.split(b":")[1])), PATIENCE_S)
                elif line == b"transfer-encoding: chunked" and b"text/event-stream" not in head:
                    body = await asyncio.wait_for(_chunks(reader), PATIENCE_S)
        return int(head.split(b" ", 2)[1]), body


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    """A chunked body: the server sends a long answer so, and any answer while it is busy."""
    body = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    return body


async def answer(victim: Victim, request: bytes) -> int:
    """The status of the answer; 0 if the connection is closed without one."""
    status, _ = await answered(victim, request)
    return status


async def asked(victim: Victim, path: str, **fields: Any) -> int:
    """The status of a POST request with the model and these fields in its body; 0 as for `answer`."""
    return await answer(victim, victim.post(path, json.dumps({"model": victim.model, **fields}).encode()))


async def completion(victim: Victim, **fields: Any) -> int:
    """The status of a completion with these fields in its body; 0 as for `answer`."""
    return await asked(victim, "/v1/completions", **{"prompt": "Once upon a time", "max_tokens": 16, **fields})


async def ends(victim: Victim, **fields: Any) -> None:
    """A completion with these fields is answered or refused."""
    status = await completion(victim, **fields)
    assert status in (200, 400, 429), (str(fields)[:100], status)


async def chat(victim: Victim, **fields: Any) -> int:
    """The status of a chat with these fields in its body; 0 as for `answer`."""
    messages = [{"role": "user", "content": "What is 12 + 9?"}]
    return await asked(victim, "/v1/chat/completions", **{"messages": messages, "max_tokens": 4, **fields})
