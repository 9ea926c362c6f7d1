"""Sends a generation as one JSON object or as a stream of server-sent events, and aborts it if the client disconnects.

The response starts with the engine's first output, so an earlier refusal has its own HTTP status, even for a stream. A
later error is the last event of the stream.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from itertools import chain
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.api.answers.writer import Writer
from server.api.worker_threads import blocks
from server.engine.generation import Choice, Generation
from server.http.encoding import json_pieces
from server.http.request_error import RequestError

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies that buffer would undo the streaming
]


class Work(Protocol):
    """The engine's work for an answer."""

    error: Exception | None  # why it has failed

    def abort(self) -> None:
        """Ends the parts of the work that still run."""


@contextlib.asynccontextmanager
async def while_connected(receive: Receive, work: Work | None = None) -> AsyncIterator[None]:
    """Cancels the current task when its client disconnects. The context then ends without an error. At the end of the
    context the work is aborted if it still runs."""
    task = asyncio.current_task()
    assert task is not None
    is_gone = False

    async def watch() -> None:
        nonlocal is_gone
        while (await receive())["type"] != "http.disconnect":
            continue
        is_gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if not is_gone or task.cancelling() > 1:
            raise
    finally:
        if work is not None:
            work.abort()
            if work.error is not None:
                work.error.__traceback__ = None  # its frames hold the work: only the garbage collector would free both
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher
        if is_gone:
            task.uncancel()


class AsgiResponse(Response):
    """An ASGI response that is sent by a function."""

    def __init__(self, function: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._function = function

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._function(scope, receive, send)


class GenerationAnswer(Response):
    """An ASGI response that runs until the generation has ended or the client has disconnected.

    Raises RequestError for an error before the response has started.
    """

    def __init__(self, generation: Generation, writer: Writer, *, stream: bool) -> None:
        self._generation = generation
        self._writer = writer
        self._stream = stream
        self._opened: set[int] = set()  # choices that have their first event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with while_connected(receive, self._generation):
            await (self._send_stream(scope, receive, send) if self._stream else self._send_whole(scope, receive, send))

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._generation.wait()
        await JsonAnswer(self._writer.whole())(scope, receive, send)

    async def _send_stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        choices = await self._generation.wait()
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        try:
            while True:
                finished = self._generation.finished  # if so, these are the last events
                events = chain.from_iterable([self._events(choice) for choice in choices])
                async for body, more in blocks(events):
                    if body and (more or not finished):
                        await send({"type": "http.response.body", "body": body, "more_body": True})
                if finished:
                    break
                choices = await self._generation.wait()
            body += self._writer.last()
        except RequestError as error:
            body = self._writer.failed(error)
        await send({"type": "http.response.body", "body": body, "more_body": False})

    def _events(self, choice: Choice) -> Iterator[bytes]:
        """The events for the choice's new output up to now, in pieces. Later output is not in them."""
        choice_delta, writer = choice.take(), self._writer
        opening = () if choice.index in self._opened else writer.opening(choice)
        self._opened.add(choice.index)
        gained = writer.gained(choice, choice_delta)
        return chain(opening, gained, () if choice.finish_reason is None else writer.ending(choice))


class JsonAnswer(Response):
    """A JSON answer. A long one is encoded while it is sent in chunks; a short one is sent whole."""

    def __init__(self, value: Any) -> None:
        self._value = value

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"application/json")]
        started = False
        async for body, more in blocks(json_pieces(self._value)):
            if not started:
                if not more:
                    headers.append((b"content-length", b"%d" % len(body)))
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                started = True
            await send({"type": "http.response.body", "body": body, "more_body": more})
