"""uvicorn's HTTP/1.1 connection, with limits on a head's size, on a client's time and on the number of connections.

The connection reads one request at a time. Bytes that arrive before the current answer is complete are dropped, and the
connection closes after that answer. A client that has sent further requests must send them again, as HTTP requires.
"""

from __future__ import annotations

import logging
from typing import Any

import httptools
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from server.http.descriptors import NUM_REFUSALS
from server.http.limits import MAX_HEAD_BYTES, TOO_LONG, refusal
from server.http.request_error import RequestError, unavailable
from server.logs import ThrottledLog
from server.settings import Settings

logger = logging.getLogger("pallas_serve")

LEAST_WAIT_S = 0.1  # a connection that has waited for less stays open: a request may have arrived but not been read
TURN_AWAY_S = 0.2  # the wait for a request's first byte before a 503: some clients read no answer before they send
LINGER_S = 2.0  # the wait for the rest of a body that was answered early: closing earlier may lose the answer
DRAIN_IDLE_S = 1.0  # the wait for a request that is in transit when the shutdown begins
UPGRADE_FIELDS = (b"upgrade", b"http2-settings")


class ConnectionLimits:
    """The limits that all connections of a server share.

    Up to `max_connections` are served. For one more, the connection that has waited longest for its next request is
    closed. If none has waited for LEAST_WAIT_S, the new connection is answered 503. More than NUM_REFUSALS connections
    beyond the limit are closed at once.
    """

    def __init__(self, settings: Settings, max_connections: int) -> None:
        self.settings = settings
        self.max_connections = max_connections
        self.draining = False
        self.log = ThrottledLog(logger)

    def admit(self, new: LimitedProtocol, connections: set[Any]) -> None:
        """Makes room for `new`, which is one of `connections`, or turns it away."""
        if len(connections) <= self.max_connections:
            return
        if len(connections) > self.max_connections + NUM_REFUSALS:
            new.transport.abort()
            return
        now = new.loop.time()
        waiting = [other for other in connections if other is not new and other.has_waited_s(now) >= LEAST_WAIT_S]
        if waiting:
            max(waiting, key=lambda other: other.has_waited_s(now)).transport.close()
        else:
            message = "all %d connections are in use: a new one is answered 503 (--max-connections)"
            self.log.warning(message, self.max_connections)
            new.turn_away(f"All {self.max_connections} connections of the server are in use.")


class LimitedProtocol(HttpToolsProtocol):
    """One connection. `check` is called several times a second and closes a connection whose client is too slow."""

    def __init__(self, *, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(**options)
        self._limits = limits
        self._phase = ""  # of the request that is being read: "head", "body", or "" for none
        self._since = self.loop.time()  # when the connection was made, a head began or an answer was complete
        self._num_since_progress = 0  # bytes since the last complete head or the last byte of a body
        self._num_dropped = 0  # bytes after a complete request, or of a body that has been answered
        self._num_unread, self._unread_since = 0, 0.0  # bytes that the client has yet to read
        self._turned_away: RequestError | None = None
        self._is_deaf = False  # whether further bytes are dropped: some came before the answer

    # called by the transport

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._limits.admit(self, self.connections)

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            self._drop(len(data))
            return
        self._unset_keepalive_if_required()
        self._num_since_progress += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError:
            if not (self._is_idle or self._phase):  # the request that is being answered is complete
                self._is_deaf, self.cycle.keep_alive = True, False
                return
            self.send_400_response("This is not a valid HTTP/1.1 request.")
        else:
            if self._num_since_progress > MAX_HEAD_BYTES:
                self.send_400_response(TOO_LONG)

    # called by the parser

    def on_message_begin(self) -> None:
        if not self._is_idle:
            raise RequestError(400, "A request before the answer to the last one.")
        super().on_message_begin()
        self._phase, self._since = "head", self.loop.time()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._phase == "head":  # trailer fields are not used
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._num_since_progress = 0
        if self.parser.should_upgrade():
            return  # `_feed` reads it again
        super().on_headers_complete()
        self._phase = "body"
        if self._limits.draining:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._num_since_progress = 0
        super().on_body(body)
        if self.cycle.response_complete:
            self._drop(len(body))

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()
            self._phase, self._since = "", self.loop.time()

    # called by the exchange and by the server

    def on_response_complete(self) -> None:
        self._since = self.loop.time()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(RequestError(400, msg))

    def turn_away(self, message: str) -> None:
        """Answers the connection's request with 503. If no request comes within TURN_AWAY_S, it is answered, too."""
        error = self._turned_away = unavailable(message, retry_after_s=1)

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await refusal(error, closes=True)(scope, receive, send)

        self.app = app

    def has_waited_s(self, now: float) -> float:
        """The seconds since the last request; 0.0 while a request is being read or answered."""
        begun = self._phase or self._num_since_progress or self.transport.is_closing()
        return now - self._since if self._is_idle and not begun else 0.0

    def drain(self) -> None:
        """Closes the connection after the request that is being answered, if there is one."""
        if not self._is_idle:
            self.cycle.keep_alive = False

    def check(self, now: float) -> None:
        """Closes the connection if its client takes too long to send or to read."""
        settings = self._limits.settings
        num_unread = self.transport.get_write_buffer_size()
        if not num_unread or num_unread != self._num_unread:
            self._num_unread, self._unread_since = num_unread, now
        elif now - self._unread_since >= settings.send_timeout_s:
            self.transport.abort()
        elapsed = now - self._since
        if self.transport.is_closing() or not self._is_idle:
            return
        if self._turned_away is not None:
            if elapsed > TURN_AWAY_S:
                self._refuse(self._turned_away)
        elif self._phase == "body":  # the rest of a body that has been answered
            if elapsed > LINGER_S:
                self.transport.close()
        elif self._phase == "head" or self._num_since_progress:
            if self._limits.draining:
                self._refuse(unavailable("The server is shutting down.", retry_after_s=5))
            elif elapsed > settings.head_timeout_s:
                self._refuse(RequestError(408, "The head of the request did not come in time."))
        else:
            limit_s = settings.head_timeout_s if self.cycle is None else settings.idle_timeout_s
            if elapsed > (DRAIN_IDLE_S if self._limits.draining else limit_s):
                self.transport.close()

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _drop(self, num_bytes: int) -> None:
        self._num_dropped += num_bytes
        if self._num_dropped > self._limits.settings.max_body_bytes:
            self.transport.abort()

    def _feed(self, data: bytes) -> None:
        """Feeds the parser. A request for an upgrade to another protocol is read again without the upgrade, because the
        parser does not read its body. The server supports no upgrade and may ignore it (RFC 9110, 7.8)."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as pause:
            method = self.parser.get_method()
            if method == b"CONNECT":
                self._refuse(RequestError(405, "CONNECT: this server is no proxy."))
                return
            head = _head_without_upgrade(method, self.url, self.parser.get_http_version(), self.headers)
            self.parser = httptools.HttpRequestParser(self)
            self._feed(head + data[pause.args[0] :])

    def _refuse(self, error: RequestError) -> None:
        """Sends the error in place of the application's answer and closes the connection. If an answer has begun, only
        closes it."""
        client = self.client[0] if self.client else "a client that has gone"
        if self._turned_away is None:  # `ConnectionLimits.admit` has logged it
            self._limits.log.warning(f"{error.status} to %s: {error.message}", client)
        if self._is_idle or not self.cycle.response_started:
            answer = refusal(error, closes=True)
            fields = [*self.server_state.default_headers, *answer.raw_headers]
            head = b"".join(b"%b: %b\r\n" % field for field in fields)
            self.transport.write(STATUS_LINE[error.status] + head + b"\r\n" + bytes(answer.body))
            self.transport.close()
        else:
            self.transport.abort()


def _head_without_upgrade(method: bytes, target: bytes, version: str, fields: list[tuple[bytes, bytes]]) -> bytes:
    """A request's head without its upgrade to another protocol. The names in `fields` are in lower case."""
    lines = [b"%b %b HTTP/%b" % (method, target, version.encode())]
    for name, value in fields:
        if name == b"connection":
            tokens = [token.strip() for token in value.split(b",")]
            value = b", ".join(token for token in tokens if token.lower() not in UPGRADE_FIELDS)
        if name not in UPGRADE_FIELDS:
            lines.append(b"%b: %b" % (name, value))
    return b"\r\n".join([*lines, b"", b""])
