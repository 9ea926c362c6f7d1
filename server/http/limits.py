"""ASGI middleware that limits the fields of a head, the time in which a body must arrive, and the memory of all
bodies."""

from __future__ import annotations

import asyncio

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.http.request_error import RequestError, unavailable
from server.settings import Settings

MAX_FIELDS = 256
MAX_HEAD_BYTES = 64 * 1024  # request line and header fields, or trailer fields
TOO_LONG = "The head of the request, or its trailer, is too long."
MIN_BODY_RATE = 1024  # bytes a second
STREAMED = "pallas_serve.streamed"  # in a scope: the application keeps no part of the body when it asks for the next


class UnfinishedRequests:
    """The bodies that are being read or decoded. Together they hold up to `most_bytes`.

    Beyond that the longest body that is being read is refused, so short ones are served while long ones fill the
    memory.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._num_bytes = 0
        self._reading: dict[BodyReader, int] = {}
        self._decoding: dict[BodyReader, int] = {}

    def begin(self, reader: BodyReader) -> None:
        self._reading[reader] = 0

    def read(self, reader: BodyReader, num_bytes: int) -> None:
        """Counts bytes of a body that is not complete. May refuse it or another one."""
        self._reading[reader] = self._reading.get(reader, 0) + num_bytes
        self._num_bytes += num_bytes
        while self._num_bytes > self._most_bytes and self._reading:
            longest = max(self._reading, key=self._reading.__getitem__)
            self.end(longest)
            longest.refuse(unavailable("The server is reading too much at once (--max-body-memory).", retry_after_s=1))

    def complete(self, reader: BodyReader) -> None:
        """Notes that the whole body has been read, and the application decodes it."""
        if reader in self._reading:
            self._decoding[reader] = self._reading.pop(reader)

    def end(self, reader: BodyReader) -> None:
        """Releases the memory of a body. Has no effect if it was released before."""
        self._num_bytes -= self._reading.pop(reader, 0) + self._decoding.pop(reader, 0)

    def refuse_all(self, error: RequestError) -> None:
        """Refuses all bodies that are not complete."""
        for reader in list(self._reading):
            self.end(reader)
            reader.refuse(error)


class BodyReader:
    """The body of one request, as the application receives it.

    Within `timeout_s` seconds of waiting, `timeout_s` * MIN_BODY_RATE bytes must arrive. Then both counts begin again,
    so earlier, faster bytes earn no time. Time in which the application does not ask for bytes does not count.
    """

    def __init__(self, receive: Receive, unfinished: UnfinishedRequests, timeout_s: float) -> None:
        self._receive = receive
        self._unfinished = unfinished
        self._timeout_s = timeout_s
        self._left_s = timeout_s
        self._missing = timeout_s * MIN_BODY_RATE
        self._waiting: asyncio.Timeout | None = None
        self._refusal: RequestError | None = None
        self._is_complete = False

    def refuse(self, error: RequestError) -> None:
        """Raises the error in the application, which waits for bytes or will ask for them."""
        self._refusal = error
        if self._waiting is not None:
            self._waiting.reschedule(0.0)

    async def receive(self, scope: Scope) -> Message:
        """Waits for the next message. Raises RequestError 408 if the body is too slow, or the error of `refuse`."""
        if self._is_complete or STREAMED in scope:
            self._unfinished.end(self)  # the application asks for more, so it has used what it has
        if self._is_complete:
            return await self._receive()
        loop = asyncio.get_running_loop()
        since = loop.time()
        try:
            if self._refusal is None:
                async with asyncio.timeout_at(since + self._left_s) as self._waiting:
                    message = await self._receive()
        except TimeoutError:
            self._refusal = self._refusal or RequestError(408, "The body of the request did not come in time.")
        finally:
            self._waiting = None
        if self._refusal is not None:
            self._is_complete = True
            raise self._refusal
        self._count(message, loop.time() - since)
        return message

    def _count(self, message: Message, seconds: float) -> None:
        num_bytes = len(message.get("body", b""))
        self._left_s -= seconds
        self._missing -= num_bytes
        if self._missing <= 0:
            self._left_s, self._missing = self._timeout_s, self._timeout_s * MIN_BODY_RATE
        self._is_complete = not message.get("more_body", False)
        if num_bytes:
            self._unfinished.read(self, num_bytes)
        if self._is_complete:
            self._unfinished.complete(self)


class RequestLimits:
    """The outermost middleware of an application. It applies to every request, also to unknown routes."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._body_timeout_s = settings.body_timeout_s
        self.unfinished = UnfinishedRequests(settings.max_body_memory_mib * 2**20)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reader = BodyReader(receive, self.unfinished, self._body_timeout_s)
        has_answered = False

        async def receive_within_limits() -> Message:
            return await reader.receive(scope)

        async def send_and_note(message: Message) -> None:
            nonlocal has_answered
            if not has_answered:
                has_answered = True
                self.unfinished.end(reader)
            await send(message)

        self.unfinished.begin(reader)
        try:
            fields = scope["headers"]
            if len(fields) > MAX_FIELDS or sum(len(name) + len(value) for name, value in fields) > MAX_HEAD_BYTES:
                raise RequestError(400, TOO_LONG)
            await self._app(scope, receive_within_limits, send_and_note)
        except RequestError as error:
            if has_answered:
                raise
            await refusal(error)(scope, receive, send)
        finally:
            self.unfinished.end(reader)


def refusal(error: RequestError, *, closes: bool = False) -> Response:
    """The error object as an answer. `closes` says that the connection closes after it: a client that still sends its
    body may then lose the answer."""
    headers = error.headers() | ({"connection": "close"} if closes else {})
    return Response(error.encode(), error.status, headers, media_type="application/json")
