"""One HTTP/1.1 connection: uvicorn's protocol, with limits on the bytes that a client sends and on its time.

The connection stores a head of up to MAX_HEAD_BYTES, and the part of the body that the application has not read yet.
It reads one request at a time. Bytes that arrive before the current answer is complete are dropped, and the connection
closes after that answer. A client that has sent further requests must send them again, as HTTP requires.

Each connection has one timer. It is set when the connection's phase changes, not for each piece of data.

After its request, a client may send an end of file. Then it has closed the whole connection or only its own half; TCP
does not show which. So the answer goes on, and an interim response (100 Continue) is sent. A fully closed socket
replies with a reset, and the request is aborted. In HTTP/1.0, without interim responses, it is aborted immediately.
"""

from __future__ import annotations

import asyncio
import enum
import select
import urllib.parse
from functools import partial
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.http.connections import BodyPace, Connections, UnreadWatch
from server.http.exchange import Exchange, head_without_upgrade, refusal
from server.http.request_error import RequestError, unavailable

MAX_HEAD_BYTES = 64 * 1024  # request line, header fields and trailer fields
MAX_FIELDS = 256
TURN_AWAY_S = 0.2  # before a 503, for the request's first byte: some clients read no answer before they send
LINGER_S = 2.0  # for a refused client to stop sending: closing earlier resets the connection, and the answer is lost
LINGER_BYTES = 2**20
DRAIN_IDLE_S = 1.0  # for a request that is in transit when the shutdown begins
FIRST_CHECK_S, LAST_CHECK_S = 0.01, 1.0  # between two checks for a reset of a half-closed connection


class Phase(enum.Enum):
    """The phase of a connection."""

    WAITING = "no byte of a request has come"
    HEAD = "reading a request's head"
    BODY = "reading its body"
    ANSWER = "the request is complete, its answer is not"
    TURNED_AWAY = "there are too many connections: whatever comes is answered 503"
    CLOSING = "all is sent; further bytes are dropped until the client closes too"


class HttpProtocol(HttpToolsProtocol):
    """One connection. It answers by itself the requests that are refused before the application sees them."""

    cycle: Exchange  # None before the first request

    def __init__(self, *, connections: Connections, **options: Any) -> None:
        super().__init__(**options)
        self._connections = connections
        self._settings = connections.settings
        self._phase = Phase.WAITING
        self._timer: asyncio.TimerHandle | None = None
        self._num_head_bytes = 0
        self._num_fields = 0
        self._num_since_progress = 0  # bytes read since the last progress
        self._num_dropped = 0
        self._progress = False  # the current bytes complete a head or a message, or belong to a body
        self._body = BodyPace(self._settings.body_timeout_s, now=0.0)
        self._unread = UnreadWatch(self._settings.send_timeout_s)
        self._half_closed = False
        self._check_s = FIRST_CHECK_S

    # called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        if self._connections.admit(self):
            self._wait(self._settings.head_timeout_s)
        else:
            self._phase = Phase.TURNED_AWAY
            self._arm(TURN_AWAY_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._connections.dismiss(self)
        self._connections.leave()
        self._connections.unfinished.complete(self)
        if self.cycle is None or self.cycle.response_started:  # otherwise the application still has the body
            self._connections.unfinished.end(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        match self._phase:
            case Phase.WAITING:
                self._connections.end_wait(self)
                self._phase = Phase.HEAD
                self._arm(self._settings.head_timeout_s)
                self._read_counted(data)
            case Phase.HEAD | Phase.BODY:
                self._read_counted(data)
            case Phase.ANSWER:
                self.cycle.make_last()
                self._drop(len(data))
            case Phase.TURNED_AWAY:
                self._turn_away()
            case Phase.CLOSING:
                self._drop(len(data))

    def eof_received(self) -> bool:  # type: ignore[override]  # uvicorn's method always closes
        """Whether the connection stays open for an answer."""
        match self._phase:
            case Phase.HEAD | Phase.BODY:
                self._refuse(RequestError(400, "The request is incomplete."))
                return False
            case Phase.ANSWER if self.cycle.scope["http_version"] == "1.1":
                self._half_closed = True
                self.cycle.make_last()
                if not self.cycle.response_started:  # otherwise the answer's next piece has the same effect
                    self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                self._arm(self._check_s)
                return True
            case _:
                return False

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._phase is Phase.ANSWER and not self._half_closed:
            self._unread = UnreadWatch(self._settings.send_timeout_s)
            self._arm(self._settings.send_timeout_s)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._phase is Phase.ANSWER and not self._half_closed:
            self._disarm()

    # called by the parser

    def on_message_begin(self) -> None:
        if self._phase is not Phase.HEAD:
            raise RequestError(400, "A request before the answer to the last one.")
        self._num_head_bytes = self._num_fields = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_fields += 1
        self._count_head(len(name) + len(value) + len(": \r\n"))
        if self._phase is Phase.HEAD:  # trailer fields are not used
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._progress = True
        if self.parser.should_upgrade():
            return  # `_read_without_upgrade` reads it again
        self._begin_exchange()  # raises for an invalid target
        self._phase = Phase.BODY
        self._body = BodyPace(self._settings.body_timeout_s, self.loop.time())
        self._arm(self._settings.body_timeout_s)

    def on_body(self, body: bytes) -> None:
        self._progress = True
        self._body.on_bytes(len(body), self.loop.time())
        if self.cycle.response_started:
            self._drop(len(body))
            return
        self.cycle.body += body
        if len(self.cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        self.cycle.message_event.set()

    def on_message_complete(self) -> None:
        self._progress = True
        if self._phase is not Phase.BODY:
            return  # a request for an upgrade
        self._phase = Phase.ANSWER
        self._connections.unfinished.complete(self)
        self._disarm()
        self.cycle.more_body = False
        self.cycle.message_event.set()

    # called by the exchange, the server, and those who count

    def refuse_body(self) -> None:
        self._refuse(unavailable("The server is reading too much at once (--max-body-memory).", retry_after_s=1))

    def on_response_complete(self) -> None:
        """Reads the connection's next request, or closes it."""
        self.server_state.total_requests += 1
        if self._phase is Phase.CLOSING or self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self._half_closed:
            self._phase = Phase.CLOSING
            self.transport.close()
            self._arm(LINGER_S)
        elif self._phase is Phase.BODY or self.cycle.closes:
            self._close_gently()
        else:
            self._wait(self._settings.idle_timeout_s)

    def close_waiting(self) -> None:
        self._connections.dismiss(self)
        self.transport.close()

    def drain(self) -> None:
        """Refuses a request that is not read completely. A request that is being answered becomes the last one."""
        match self._phase:
            case Phase.WAITING:
                self._arm(DRAIN_IDLE_S)
            case Phase.HEAD | Phase.BODY:
                self._refuse(unavailable("The server is shutting down.", retry_after_s=5))
            case Phase.ANSWER:
                self.cycle.make_last()

    def shutdown(self) -> None:
        """The server now only waits for its last connections."""
        if self._phase is Phase.WAITING:
            self.close_waiting()
        else:
            self.drain()

    # reading

    def _read_counted(self, data: bytes) -> None:
        """Reads bytes of a request. They count if the request goes on after them."""
        self._read(data)
        if self._phase is Phase.HEAD or (self._phase is Phase.BODY and not self.cycle.response_started):
            self._connections.unfinished.read(self, len(data))

    def _read(self, data: bytes) -> None:
        self._progress = False
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as pause:
            self._read_without_upgrade(data[pause.args[0] :])
        except httptools.HttpParserError as error:
            if self._phase is Phase.ANSWER:  # the request is complete; the error is in the bytes after it
                self.cycle.make_last()
            else:
                own = error.__context__  # raised by a callback of this class
                invalid = RequestError(400, "This is not a valid HTTP/1.1 request.")
                self._refuse(own if isinstance(own, RequestError) else invalid)
            return
        self._num_since_progress = 0 if self._progress else self._num_since_progress + len(data)
        if self._num_since_progress > MAX_HEAD_BYTES:
            self._refuse(_too_long())

    def _read_without_upgrade(self, rest: bytes) -> None:
        """Reads the request again without its upgrade to another protocol: the parser does not read the body of an
        upgrade. The server supports no other protocol and may ignore the upgrade (RFC 9110, 7.8)."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse(RequestError(405, "CONNECT: this server is no proxy."))
            return
        head = head_without_upgrade(method, self.url, self.parser.get_http_version(), self.headers)
        self.parser = httptools.HttpRequestParser(self)
        self._read(head + rest)

    def _count_head(self, num_bytes: int) -> None:
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > MAX_HEAD_BYTES or self._num_fields > MAX_FIELDS:
            raise _too_long()

    def _begin_exchange(self) -> None:
        """Does the work of uvicorn's `on_headers_complete`, without upgrades and without a queue of requests."""
        url = httptools.parse_url(self.url)
        version = self.parser.get_http_version()
        path = url.path.decode("ascii")
        self.scope |= {
            "method": self.parser.get_method().decode("ascii"),
            "http_version": version,
            "path": urllib.parse.unquote(path) if "%" in path else path,
            "raw_path": url.path,
            "query_string": url.query or b"",
        }
        self.cycle = Exchange(
            scope=self.scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue,
            keep_alive=version == "1.1" and self.parser.should_keep_alive() and not self._connections.draining,
            on_response=self.on_response_complete,
            on_decoded=partial(self._connections.unfinished.end, self),
        )
        self._start_asgi_task(self.cycle, self.app)

    def _drop(self, num_bytes: int) -> None:
        self._num_dropped += num_bytes
        if self._num_dropped > LINGER_BYTES:
            self.transport.abort()

    # refusing and closing

    def _turn_away(self) -> None:
        message = f"All {self._connections.max_connections} connections of the server are in use."
        self._refuse(unavailable(message, retry_after_s=1), log=False)  # `Connections.admit` has logged it

    def _refuse(self, error: RequestError, *, log: bool = True) -> None:
        """Answers instead of the application, unless its answer has begun. Then closes the connection."""
        if log:
            client = self.client[0] if self.client else "a client that has gone"
            self._connections.log.warning(f"{error.status} to %s: {error.message}", client)
        begun = self._phase is Phase.BODY and self.cycle.response_started
        if begun:
            self.cycle.cut_off()
        elif self._phase is Phase.BODY:
            self.cycle.refuse(error.status)
        if not begun:
            self.transport.write(refusal(error, self.server_state.default_headers))
        self._close_gently()

    def _close_gently(self) -> None:
        """Sends the remaining bytes and an end of file. The client then closes the connection, or the timer does."""
        self._phase = Phase.CLOSING
        self._connections.unfinished.complete(self)
        self.flow.resume_reading()
        self.transport.write_eof()
        self._unread = UnreadWatch(self._settings.send_timeout_s)
        self._arm(LINGER_S)

    # time

    def _wait(self, seconds: float) -> None:
        self._phase = Phase.WAITING
        self._connections.begin_wait(self)
        self._arm(DRAIN_IDLE_S if self._connections.draining else seconds)

    def _arm(self, seconds: float) -> None:
        self._disarm()
        self._timer = self.loop.call_later(seconds, self._on_timer)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        match self._phase:
            case Phase.WAITING if self.transport.get_write_buffer_size():
                self._connections.end_wait(self)
                self._close_gently()  # the client has not read its last answer
            case Phase.WAITING:
                self.close_waiting()
            case Phase.HEAD:
                self._refuse(RequestError(408, "The head of the request did not come in time."))
            case Phase.BODY:
                self._check_body()
            case Phase.ANSWER:
                self._check_client()
            case Phase.TURNED_AWAY:
                self._turn_away()
                self.transport.close()  # the client has sent nothing, so closing does not reset the connection
            case Phase.CLOSING if self.transport.get_write_buffer_size() and not self._is_stuck():
                self._arm(LINGER_S)
            case Phase.CLOSING:
                self.transport.abort()

    def _check_body(self) -> None:
        left_s = self._body.left_s(self.loop.time())
        if self.flow.read_paused:
            self._body.restart(self.loop.time())  # the application has not taken the bytes so far
            self._arm(self._settings.body_timeout_s)
        elif left_s > 0:
            self._arm(left_s)
        else:
            self._refuse(RequestError(408, "The body of the request did not come in time."))

    def _check_client(self) -> None:
        """Aborts the answer if the client has reset the connection or does not read."""
        if (self._half_closed and _is_reset(self.transport)) or self._is_stuck():
            self.transport.abort()
        elif self._half_closed:
            self._check_s = min(2 * self._check_s, LAST_CHECK_S)
            self._arm(self._check_s)
        else:
            self._arm(self._settings.send_timeout_s)

    def _is_stuck(self) -> bool:
        return self._unread.is_stuck(self.transport.get_write_buffer_size(), self.loop.time())


def _is_reset(transport: asyncio.Transport) -> bool:
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), 0)  # errors and hang-ups are always reported
    return bool(poll.poll(0))


def _too_long() -> RequestError:
    return RequestError(400, "The head of the request, or its trailer, is too long.")
