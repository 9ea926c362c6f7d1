"""Requests of hostile or broken clients, one attack per function. Each is bounded and takes at most seconds.

An attack raises AssertionError for an answer that is not allowed. For most attacks the server may also close the
connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from random import Random
from typing import Any

PATIENCE_S = 60.0  # for one answer


@dataclass(frozen=True, kw_only=True)
class Victim:
    """The server under attack."""

    host: str
    port: int
    model: str


Attack = Callable[[Victim, Random], Awaitable[None]]


@contextlib.asynccontextmanager
async def connected(victim: Victim) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A raw connection. It is aborted at the end."""
    reader, writer = await asyncio.open_connection(victim.host, victim.port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


def post(path: str, body: bytes, *headers: str) -> bytes:
    """A request as bytes; `headers` are further lines of its head."""
    head = [f"POST {path} HTTP/1.1", "Host: a", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*head, *headers, "", ""]).encode() + body


async def answer(victim: Victim, request: bytes) -> int:
    """The status of the answer; 0 if the connection is closed without one. Reads the body to its end."""
    async with connected(victim) as (reader, writer):
        with contextlib.suppress(ConnectionError):
            writer.write(request)
            await writer.drain()
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
        except (asyncio.IncompleteReadError, ConnectionError):
            return 0
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                    await asyncio.wait_for(reader.readexactly(int(line.split(b":")[1])), PATIENCE_S)
        return int(head.split(b" ", 2)[1])


async def completion(victim: Victim, **fields: Any) -> int:
    """The status of a completion with these fields of the body; 0 if the connection is closed without an answer."""
    body = {"model": victim.model, "prompt": "Once upon a time", "max_tokens": 16, **fields}
    return await answer(victim, post("/v1/completions", json.dumps(body).encode()))


async def hostile_stop_strings(victim: Victim, random: Random) -> None:
    """Stop strings that almost match at every character."""
    stops = ["a" * random.randint(400, 600) + "b" * random.randint(300, 423) + "X" for _ in range(31)]
    status = await completion(victim, stop=stops, max_tokens=200, ignore_eos=True, prompt="a" * 50)
    assert status in (200, 400, 429), status


async def endless_trailers(victim: Victim, random: Random) -> None:
    """Trailers after the last chunk, megabytes of them."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
    status = await answer(victim, head + b"a: b\r\n" * 640_000)
    assert status in (0, 400), status


async def large_answer(victim: Victim, random: Random) -> None:
    """Asks for many choices with the most log-probabilities."""
    status = await completion(victim, n=16, logprobs=20, max_tokens=100, ignore_eos=True)
    assert status in (200, 400, 429), status


async def scored_prompts(victim: Victim, random: Random) -> None:
    """Asks for the log-probabilities of a prompt in eight choices."""
    prompt = [random.randint(5, 200) for _ in range(200)]
    status = await completion(victim, n=8, prompt=prompt, prompt_logprobs=20, max_tokens=1)
    assert status in (200, 400, 429), status


async def many_long_prompts(victim: Victim, random: Random) -> None:
    """Sends 64 prompts of 4,000 words in one request."""
    status = await completion(victim, prompt=["word " * 4000] * 64, max_tokens=1)
    assert status in (400, 429), status


async def echoed_ids(victim: Victim, random: Random) -> None:
    """Asks for the echo of 32 prompts of token ids."""
    status = await completion(victim, prompt=[[7] * 400] * 32, max_tokens=1, echo=True)
    assert status in (200, 400, 429), status


async def too_large_a_body(victim: Victim, random: Random) -> None:
    """Sends a body of 9 MiB."""
    status = await answer(victim, post("/v1/completions", b'{"prompt": "' + b"a" * (9 << 20)))
    assert status in (0, 413), status


async def not_json(victim: Victim, random: Random) -> None:
    """Sends random bytes as a body."""
    garbage = random.randbytes(random.randint(1, 2000))
    assert await answer(victim, post("/v1/chat/completions", garbage)) == 400


async def deep_json(victim: Victim, random: Random) -> None:
    """Sends 100,000 opening brackets as a body."""
    assert await answer(victim, post("/v1/chat/completions", b"[" * 100_000)) == 400


async def not_http(victim: Victim, random: Random) -> None:
    """Sends random bytes as a request."""
    assert await answer(victim, random.randbytes(500) + b"\r\n\r\n") in (0, 400)


async def silent_connections(victim: Victim, random: Random) -> None:
    """Connections that send nothing, or half a request, for a while."""
    async with contextlib.AsyncExitStack() as stack:
        for i in range(20):
            _, writer = await stack.enter_async_context(connected(victim))
            beginnings = (
                b"",
                b"GET /health HTTP/1.1\r\nHo",
                b"POST /v1/completions HTTP/1.1\r\nContent-Length: 9\r\n\r\n{",
            )
            writer.write(beginnings[i % 3])
        await asyncio.sleep(random.uniform(0.5, 2))


async def leaving_mid_stream(victim: Victim, random: Random) -> None:
    """Closes the connection while its answer is streamed."""
    body = {"model": victim.model, "prompt": "Once", "max_tokens": 300, "ignore_eos": True, "stream": True}
    async with connected(victim) as (reader, writer):
        writer.write(post("/v1/completions", json.dumps(body).encode()))
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
            for _ in range(random.randint(0, 5)):
                await asyncio.wait_for(reader.read(1000), PATIENCE_S)


async def half_closing(victim: Victim, random: Random) -> None:
    """A client that closes its half of the connection after its request."""
    async with connected(victim) as (reader, writer):
        writer.write(b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        writer.write_eof()
        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(reader.read(), PATIENCE_S)


async def strange_routes(victim: Victim, random: Random) -> None:
    """Asks for paths and methods that are not served."""
    for request in (
        b"GET /metrics/ HTTP/1.1\r\nHost: elsewhere\r\n\r\n",
        b"DELETE /v1/models HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /%00%ff HTTP/1.1\r\nHost: a\r\n\r\n",
    ):
        assert await answer(victim, request) in (400, 404, 405)


ATTACKS: tuple[Attack, ...] = (
    hostile_stop_strings,
    endless_trailers,
    large_answer,
    scored_prompts,
    many_long_prompts,
    echoed_ids,
    too_large_a_body,
    not_json,
    deep_json,
    not_http,
    silent_connections,
    leaving_mid_stream,
    half_closing,
    strange_routes,
)
