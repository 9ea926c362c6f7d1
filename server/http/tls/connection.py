"""One connection with TLS: its handshake, then the protocol of its requests."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import cast

from server.http.connections import Connections
from server.http.errors import RequestError
from server.http.messages import refusal
from server.http.tls.transport import TlsTransport

REFUSED_HANDSHAKE_S = 2.0  # for a handshake after which the client is answered 503


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
            seconds = self._connections.limits.head_timeout_s
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
