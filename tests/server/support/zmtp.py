"""A stranger at a port of ZeroMQ, who speaks its protocol by hand."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable, Iterator
from itertools import repeat

MORE, LARGE, COMMAND = 1, 2, 4  # flags of a frame
MOST_FLOODED = 12 << 20  # bytes: the buffers of both ends of a TCP connection on this machine, and then some


def frame(body: bytes, flags: int = 0, size: int | None = None) -> bytes:
    """A frame of ZMTP 3. `size` is what its head says, if it is not the truth."""
    size = len(body) if size is None else size
    if size > 255:
        return bytes([flags | LARGE]) + size.to_bytes(8, "big") + body
    return bytes([flags, size]) + body


@contextlib.contextmanager
def connected(port: int, kind: bytes, mechanism: bytes = b"NULL") -> Iterator[socket.socket]:
    """A peer of this kind of socket that has ended its handshake, or was refused in it."""
    greeting = b"\xff" + bytes(8) + b"\x7f\3\0" + mechanism.ljust(20, b"\0") + bytes(32)
    named = b"\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind
    with socket.create_connection(("127.0.0.1", port), timeout=30) as stranger:
        stranger.sendall(greeting + frame(b"\5READY" + named, COMMAND))
        said = b""
        with contextlib.suppress(ConnectionResetError):
            while b"READY" not in said and (more := stranger.recv(1 << 16)):  # before it, messages are refused
                said += more
        yield stranger


def sent(stranger: socket.socket, pieces: Iterable[bytes], most: int = 32 << 20) -> int:
    """The bytes that the other end took before it closed the connection; `most`, or all, if it did not."""
    total, waiting = 0, bytearray()
    for piece in pieces:
        waiting += piece
        if len(waiting) >= 1 << 16:
            try:
                stranger.sendall(waiting)
            except ConnectionError:
                return total
            total += len(waiting)
            waiting.clear()
            if total >= most:
                break
    return total


def flood(port: int, kind: bytes, mechanism: bytes = b"NULL") -> int:
    """Bytes that are taken of a message without an end, of frames of one byte."""
    with connected(port, kind, mechanism) as stranger:
        return sent(stranger, repeat(frame(b"x", MORE) * (1 << 10), 1 << 14))


def is_refused(port: int, kind: bytes, size: int) -> bool:
    """Whether the connection is closed for the head of a frame that is so long, before its body. Or else TimeoutError
    is raised."""
    with connected(port, kind) as stranger:
        stranger.sendall(frame(b"", 0, size))
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(1 << 16):  # the greeting, and what else comes before
                pass
        return True
