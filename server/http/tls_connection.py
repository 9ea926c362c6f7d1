"""One connection with TLS: its handshake, then the protocol of its requests, over a transport that encrypts.

asyncio's own TLS transports have no half-closed connections, wait for the client's reply before they close, and do not
count the bytes that the socket has not taken. With this one a connection's limits, and the way it closes, are the same
with and without TLS.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable, Iterator
from typing import Any, cast

from server.http.connections import Connections
from server.http.exchange import refusal
from server.http.request_error import RequestError

REFUSED_HANDSHAKE_S = 2.0  # for a handshake after which the client is answered 503
READ_BYTES = 64 * 1024  # decrypted at a time
_SAME_BELOW = "is_closing is_reading pause_reading resume_reading get_write_buffer_size can_write_eof abort".split()


class TlsConnection(asyncio.Protocol):
    """Passes a socket's bytes to the protocol of its requests, which `create` makes after the handshake.

    Until then the connection waits, like one without a request: it is closed after the head timeout, or when it has
    waited longest and another one needs the room.
    """

    def __init__(
        self, context: ssl.SSLContext, connections: Connections, create: Callable[[], asyncio.Protocol]
    ) -> None:
        self._context = context
        self._connections = connections
        self._create = create
        self._protocol: asyncio.Protocol | None = None
        self._client_has_ended = False  # its end mark was read
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._socket = cast("asyncio.Transport", transport)
        self._transport = TlsTransport(self._socket, self._context)
        seconds = REFUSED_HANDSHAKE_S
        if self._connections.admit(self):
            self._connections.begin_wait(self)
            seconds = self._connections.settings.head_timeout_s
        self._timer = asyncio.get_running_loop().call_later(seconds, self.close_waiting)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._protocol is not None:
            self._protocol.connection_lost(exc)
        else:
            self._end_handshake()
            self._connections.leave()

    def data_received(self, data: bytes) -> None:
        try:
            if self._protocol is None:
                if not self._transport.shake_hands(data):
                    return
                self._end_handshake()
                self._protocol = self._create()
                self._protocol.connection_made(self._transport)
                data = b""  # more than the handshake may have been read
            self._receive(self._protocol, data)
        except ssl.SSLError as error:
            self._fail(error)

    def _receive(self, protocol: asyncio.Protocol, data: bytes) -> None:
        if self._client_has_ended:
            protocol.data_received(data)  # it drops what follows its request
            return
        for piece in self._transport.decrypt(data):
            if piece:
                protocol.data_received(piece)
            else:
                self._client_has_ended = True
                if not protocol.eof_received():
                    self._transport.close()

    def eof_received(self) -> bool:
        if self._protocol is None:
            return False
        return self._client_has_ended or bool(self._protocol.eof_received())

    def pause_writing(self) -> None:
        if self._protocol is not None:
            self._protocol.pause_writing()

    def resume_writing(self) -> None:
        if self._protocol is not None:
            self._protocol.resume_writing()

    def close_waiting(self) -> None:
        """Closes a connection whose handshake is not complete."""
        self._end_handshake()
        self._socket.abort()

    def _end_handshake(self) -> None:
        self._connections.dismiss(self)
        if self._timer is not None:
            self._timer.cancel()

    def _fail(self, error: ssl.SSLError) -> None:
        """Closes the connection after an error of the client. TLS has told it so, and plain HTTP is told in words."""
        address = self._socket.get_extra_info("peername")
        client = address[0] if address else "a client"
        self._connections.log.warning("TLS with %s has failed: %s", client, error.reason or error)
        if error.reason == "HTTP_REQUEST":
            self._socket.write(refusal(RequestError(400, "This port speaks HTTPS: say https:// in the address."), ()))
        self._socket.close()


class TlsTransport(asyncio.Transport):
    """What is not sent yet, and the flow control, are those of the transport below.

    The server's end mark (`close_notify`) is sent by `write_eof` and `close`. The client's is not waited for.
    """

    def __init__(self, below: asyncio.Transport, context: ssl.SSLContext) -> None:
        super().__init__({"sslcontext": context})
        self._below = below
        for name in _SAME_BELOW:
            setattr(self, name, getattr(below, name))
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._has_ended = False

    # for the connection

    def shake_hands(self, data: bytes) -> bool:
        """Reads bytes of the handshake. Returns whether it is complete. Raises ssl.SSLError."""
        self._incoming.write(data)
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        finally:
            self._flush()  # an alert, too
        return True

    def decrypt(self, data: bytes) -> Iterator[bytes]:
        """The client's bytes in pieces. The last piece is b"" if its end mark is read. Raises ssl.SSLError.

        After the server's own end mark the encrypted bytes are returned: the connection drops and counts them.
        """
        if self._has_ended:
            yield data
            return
        self._incoming.write(data)
        piece = b"-"
        try:
            while piece and not (self._has_ended or self.is_closing()):
                piece = self._tls.read(READ_BYTES)
                yield piece
        except ssl.SSLWantReadError:
            pass  # the rest of a record has not come yet
        finally:
            self._flush()  # answers of TLS itself, such as a new key

    def _flush(self) -> None:
        if self._outgoing.pending and not self.is_closing():
            self._below.write(self._outgoing.read())

    # for the protocol

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        if not (self._has_ended or self.is_closing()):
            self._tls.write(data)
            self._flush()

    def write_eof(self) -> None:
        self._end()
        self._below.write_eof()

    def close(self) -> None:
        self._end()
        self._below.close()

    def _end(self) -> None:
        if not (self._has_ended or self.is_closing()):
            self._has_ended = True
            with contextlib.suppress(ssl.SSLError):  # the client's end mark, or bytes before it, have not come
                self._tls.unwrap()
            self._flush()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        own = super().get_extra_info(name)
        return self._below.get_extra_info(name, default) if own is None else own
