"""The messages between the server and the processes that run templates: frames of bytes over a socket."""

from __future__ import annotations

import enum
import socket
import struct
from typing import NamedTuple

import msgspec

_LENGTH = struct.Struct("<Q")
_PIECE = 1 << 20  # a frame's memory is allocated in pieces while its bytes arrive


class TemplateError(ValueError):
    """The template refuses the conversation or cannot be run. The message may be shown to the client."""


class Job(NamedTuple):
    """A template to run. It is pickled, because the process trusts the server. The server does not trust the
    process."""

    program: bytes  # a pickled Program: the process keeps compiled programs by these bytes
    timeout_s: float
    max_chars: int  # a longer rendering is counted, and not sent
    call: dict[str, object] | None  # the arguments of `ChatTemplate.render`; None: the template is compiled only


class Program(NamedTuple):
    """A template's source, and the values that its tokenizer gives to it."""

    source: str
    special_tokens: tuple[str, ...]
    variables: dict[str, str]


class Fault(enum.StrEnum):
    """The reason why there is no rendering."""

    NONE = "none"
    REFUSED = "refused"  # by the template; `error` says why
    MEMORY = "memory"  # it needs more than the process may have: the process ends


class Reply(msgspec.Struct, array_like=True):
    """The rendering as parts of text, each marked as plain or as a special token; or a fault."""

    fault: Fault = Fault.NONE
    error: str = ""
    variables: list[str] = []  # that the template reads
    num_chars: int = 0  # of the rendering
    parts: list[tuple[str, bool]] = []


def send(channel: socket.socket, frame: bytes) -> None:
    """Sends a frame. Raises TimeoutError or OSError."""
    channel.sendall(_LENGTH.pack(len(frame)))
    channel.sendall(frame)


def receive(channel: socket.socket, max_bytes: int) -> bytes | None:
    """The next frame; None at the end. Raises TimeoutError or OSError, and ValueError for a frame that is too long."""
    head = _exactly(channel, _LENGTH.size)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > max_bytes:
        raise ValueError(f"a frame has {length} bytes; at most {max_bytes} are read")
    return _exactly(channel, length)


def _exactly(channel: socket.socket, length: int) -> bytes | None:
    received = bytearray()
    while len(received) < length:
        piece = channel.recv(min(_PIECE, length - len(received)))
        if not piece:
            return None
        received += piece
    return bytes(received)
