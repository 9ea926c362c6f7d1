"""One request and its answer, as uvicorn passes them to the application, and what the connection writes by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from server.http.request_error import RequestError

REFUSED = "pallas_serve.refused"  # in a scope: the status of an answer by the connection, not by the application
STREAMED = "pallas_serve.streamed"  # in a scope: the application keeps no part of the body when it asks for the next
Fields = Iterable[tuple[bytes, bytes]]
UPGRADE_FIELDS = (b"upgrade", b"http2-settings")


class Exchange(RequestResponseCycle):
    """uvicorn's RequestResponseCycle, but the connection itself closes the socket, not the exchange.

    `on_decoded` is called when the application does not need the body any more: it has begun its answer, or waits for
    the client to disconnect. `closes`: the connection must close when the answer is complete. `keep_alive` is uvicorn's
    flag: the answer's head announces that the connection stays open.
    """

    def __init__(self, *, on_decoded: Callable[[], None], **fields: Any) -> None:
        super().__init__(**fields)
        self.closes = False
        self._on_decoded: Callable[[], None] | None = on_decoded
        self._body_was_taken = False

    def make_last(self) -> None:
        """Makes this the connection's last request. The answer's head announces it, unless it has been sent already."""
        self.keep_alive = self.response_started and self.keep_alive
        self.closes = True

    def refuse(self, status: int) -> None:
        """The connection answers instead of the application."""
        cast("dict[str, Any]", self.scope)[REFUSED] = status
        self.cut_off()

    def cut_off(self) -> None:
        """For the application, the client is now disconnected. The application's further messages are dropped."""
        if not self.response_complete:
            self.disconnected = True
            self.message_event.set()

    async def receive(self) -> Any:
        if self._body_was_taken:
            self._end_body()
        elif STREAMED in self.scope and self._on_decoded is not None:
            self._on_decoded()
        message = await super().receive()
        self._body_was_taken = message["type"] == "http.request" and not message["more_body"]
        return message

    async def send(self, message: Any) -> None:
        if self.response_started:
            await super().send(message)
            return
        self._end_body()
        if self.more_body:  # an early answer: the rest of this body must not be read as the next request
            self.keep_alive = False
        await super().send(message)
        self.closes = self.closes or not self.keep_alive
        self.keep_alive = True  # else uvicorn closes while bytes are unread, and the client may lose the answer

    def _end_body(self) -> None:
        """Only the first time: later the connection may be reading its next request."""
        if self._on_decoded is not None:
            self._on_decoded()
            self._on_decoded = None


def refusal(error: RequestError, default_fields: Fields) -> bytes:
    """The answer with the error object. Its head announces that the connection closes."""
    body = error.encode()
    fields = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
        **error.headers(),
    }
    own = [(name.encode(), value.encode()) for name, value in fields.items()]
    return STATUS_LINE[error.status] + _fields([*default_fields, *own]) + body


def head_without_upgrade(method: bytes, target: bytes, version: str, fields: Fields) -> bytes:
    """A request's head without its upgrade to another protocol. The names in `fields` are in lower case."""
    kept = []
    for name, value in fields:
        if name == b"connection":
            tokens = [token.strip() for token in value.split(b",")]
            value = b", ".join(token for token in tokens if token.lower() not in UPGRADE_FIELDS)
        if name not in UPGRADE_FIELDS:
            kept.append((name, value))
    return b"%b %b HTTP/%b\r\n" % (method, target, version.encode()) + _fields(kept)


def _fields(fields: Fields) -> bytes:
    return b"".join([b"%b: %b\r\n" % field for field in fields]) + b"\r\n"
