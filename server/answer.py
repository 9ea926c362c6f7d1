"""Answering a generation: whole or as a stream of server-sent events, watching the socket all the while.

Nothing is sent before the engine's first output, so that a refusal still gets its own HTTP status, streamed or not.
After that an error is an event: `data: {"error": ...}`, then `data: [DONE]`. A client that goes away aborts its
request.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.errors import RequestError
from server.generation import Choice, Generation
from server.sse import DONE, event

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies that buffer would undo the streaming
]


class Writer(Protocol):
    """The form of the answer: chat's or completions'."""

    def whole(self) -> bytes:
        """The JSON body, once every choice has finished."""

    def frames(self, choice: Choice) -> bytes:
        """The events for what the choice has gained; takes it from the choice. May be empty."""

    def last_frames(self) -> bytes:
        """What follows when all choices have finished, before [DONE]."""


class ClientGone(Exception):  # noqa: N818 - nobody's error
    """The socket has closed."""


class GenerationAnswer(Response):
    """An ASGI response that runs until the generation has ended or its client has gone."""

    def __init__(self, generation: Generation, writer: Writer, *, stream: bool) -> None:
        self._generation = generation
        self._writer = writer
        self._stream = stream
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(self._watch(receive))
        try:
            await (self._send_stream(scope, receive, send) if self._stream else self._send_whole(scope, receive, send))
        except ClientGone:
            pass  # there is nobody to answer
        finally:
            self._generation.abort()
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            continue
        self._generation.fail(ClientGone())

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._generation.wait()
        except RequestError as error:
            await error_response(error)(scope, receive, send)
            return
        await Response(self._writer.whole(), media_type="application/json")(scope, receive, send)

    async def _send_stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            choices = await self._generation.wait()
        except RequestError as error:
            await error_response(error)(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        frames = self._writer.frames
        try:
            while True:
                body = b"".join([frames(choice) for choice in choices])
                if self._generation.finished:
                    break
                if body:
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                choices = await self._generation.wait()
            body += self._writer.last_frames()
        except RequestError as error:
            body = event(error.encode())
        await send({"type": "http.response.body", "body": body + DONE, "more_body": False})


def error_response(error: RequestError) -> Response:
    return Response(error.encode(), error.status, error.headers(), "application/json")
