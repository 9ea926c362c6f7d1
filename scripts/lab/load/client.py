"""A streaming client for any OpenAI-compatible server. It uses as little of the machine as possible."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
import numpy as np

from scripts.lab.load.workload import BenchRequest


@dataclass(kw_only=True)
class Outcome:
    """The outcome of one request. Times are seconds of `time.perf_counter`."""

    start: float
    lag: float = 0.0  # seconds between the planned arrival and the sending: the client's delay
    chunk_times: list[float] = field(default_factory=list)  # of each chunk with text or a token
    end: float = 0.0
    prompt_tokens: int | None = None  # None: the server did not report it
    completion_tokens: int | None = None
    text: str = ""
    error: str | None = None

    @property
    def output_tokens(self) -> int:
        """The server's count, or the number of chunks if there is none."""
        return len(self.chunk_times) if self.completion_tokens is None else self.completion_tokens


@dataclass(frozen=True, kw_only=True)
class Target:
    """The server under load, and the common fields of all requests."""

    base_url: str  # http://host:port, without /v1
    model: str
    chat: bool = False
    temperature: float = 0.0
    ignore_eos: bool = False  # an extension that OpenAI does not have but most open servers do
    include_usage: bool = True
    extra_body: dict[str, Any] = field(default_factory=dict)
    api_key: str | None = None
    timeout_s: float = 3600.0
    keep_text: bool = False

    @property
    def url(self) -> str:
        """The route that requests go to."""
        return self.base_url.rstrip("/") + ("/v1/chat/completions" if self.chat else "/v1/completions")

    def body(self, request: BenchRequest) -> dict[str, Any]:
        """The JSON of one request. Raises ValueError for token ids as a chat message."""
        body: dict[str, Any] = {"model": self.model, "temperature": self.temperature, "stream": True}
        body["max_tokens"] = request.max_tokens
        if self.chat:
            if not isinstance(request.prompt, str):
                raise ValueError("a chat message is text: use --prompt-format text")
            body["messages"] = [{"role": "user", "content": request.prompt}]
        else:
            body["prompt"] = request.prompt
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.include_usage:
            body["stream_options"] = {"include_usage": True}
        return body | self.extra_body | request.fields


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


async def run(
    target: Target,
    requests: Sequence[BenchRequest],
    *,
    arrivals: Sequence[float] | np.ndarray | None,
    max_concurrency: int | None,
    send_until_s: float = math.inf,
) -> tuple[list[Outcome], float]:
    """Sends every request, each at its arrival (None: at once) and with at most `max_concurrency` in flight.

    Requests whose turn comes later than `send_until_s` seconds after the start are not sent, but for the first that are
    in flight at once. Returns one Outcome per request sent, in order, and the seconds from the first sending to the
    last end.
    """
    bodies = [msgspec.json.encode(target.body(request)) for request in requests]
    headers = {"Content-Type": "application/json"}
    if target.api_key:
        headers["Authorization"] = f"Bearer {target.api_key}"
    slots = asyncio.Semaphore(max_concurrency or len(requests))
    # One connection per request: some servers reset idle connections, and the reset would count as a failure.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=target.timeout_s)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
        started = time.perf_counter()

        async def one(index: int) -> Outcome | None:
            planned = started + (arrivals[index] if arrivals is not None else 0.0)
            await asyncio.sleep(max(0.0, planned - time.perf_counter()))
            async with slots:
                outcome = Outcome(start=time.perf_counter())
                if outcome.start - started > send_until_s and index >= (max_concurrency or 1):
                    return None
                if arrivals is not None:
                    outcome.lag = outcome.start - planned
                await _stream(session, target, bodies[index], outcome)
                return outcome

        outcomes = await asyncio.gather(*(one(index) for index in range(len(requests))))
        return [outcome for outcome in outcomes if outcome is not None], time.perf_counter() - started


async def _stream(session: aiohttp.ClientSession, target: Target, body: bytes, outcome: Outcome) -> None:
    """Fills `outcome`. An error is part of the result and does not end the benchmark."""
    try:
        async with session.post(target.url, data=body) as response:
            if response.status != 200:
                outcome.error = f"HTTP {response.status}: {(await response.text())[:300]}"
            else:
                await _read_events(response, outcome, target.keep_text)
    except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    outcome.end = time.perf_counter()


async def _read_events(response: aiohttp.ClientResponse, outcome: Outcome, keep_text: bool) -> None:
    rest, texts, ended = b"", [], False
    async for data in response.content.iter_any():
        now = time.perf_counter()
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            payload = line[5:].strip()
            if payload == b"[DONE]":
                ended = True
                continue
            chunk = _decode_chunk(payload)
            if chunk.error is not None:
                outcome.error = f"error event: {chunk.error}"
            if chunk.usage is not None:
                outcome.prompt_tokens = chunk.usage.prompt_tokens
                outcome.completion_tokens = chunk.usage.completion_tokens
            for choice in chunk.choices:
                ended |= choice.finish_reason is not None  # some servers then close the connection without [DONE]
                text = choice.text if choice.delta is None else choice.delta.content
                if text:
                    outcome.chunk_times.append(now)
                    if keep_text:
                        texts.append(text)
    outcome.text = "".join(texts)
    if not ended and outcome.error is None:
        outcome.error = "the stream broke off: neither a finish_reason nor [DONE]"
