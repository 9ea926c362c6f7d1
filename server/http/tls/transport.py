"""A transport that encrypts for the socket's transport below it.

asyncio's own TLS transports have no half-closed connections, wait for the client's reply before they close, and do not
count the bytes that the socket has not taken. With this one a connection's limits, and the way it closes, are the same
with and without TLS.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Iterator
from typing import Any

READ_BYTES = 64 * 1024  # decrypted at a time


class TlsTransport(asyncio.Transport):
    """What is not sent yet, and the flow control, are those of the transport below.

    The server's end mark (`close_notify`) is sent by `write_eof` and `close`. The client's is not waited for.
    """

    def __init__(self, below: asyncio.Transport, context: ssl.SSLContext) -> None:
        super().__init__({"sslcontext": context})
        self._below = below
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

    def can_write_eof(self) -> bool:
        return True

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

    # the same as below

    def is_closing(self) -> bool:
        return self._below.is_closing()

    def is_reading(self) -> bool:
        return self._below.is_reading()

    def pause_reading(self) -> None:
        self._below.pause_reading()

    def resume_reading(self) -> None:
        self._below.resume_reading()

    def get_write_buffer_size(self) -> int:
        return self._below.get_write_buffer_size()

    def abort(self) -> None:
        self._below.abort()
