"""What the server and the processes that run templates say to each other: frames of bytes over a socket."""

from __future__ import annotations

import enum
import socket
import struct
from typing import NamedTuple

import msgspec

_LENGTH = struct.Struct("<Q")
_PIECE = 1 << 20  # a frame's memory is allocated as its bytes come


class TemplateError(ValueError):
    """The template refuses the conversation or cannot be run. The message may be shown to the client."""


class Job(NamedTuple):
    """A template to run. It is pickled: the process trusts the server, which does not trust the process."""

    program: bytes  # a pickled Program: the process keeps compiled programs by these bytes
    timeout_s: float
    max_chars: int  # a longer rendering is counted, and not sent
    call: dict[str, object] | None  # the arguments of `ChatTemplate.render`; None: the template is compiled only


class Program(NamedTuple):
    """A template's source, and what its tokenizer gives to it."""

    source: str
    special_tokens: tuple[str, ...]
    variables: dict[str, str]


class Fault(enum.StrEnum):
    """Why there is no rendering."""

    NONE = "none"
    REFUSED = "refused"  # by the template; `error` says why
    MEMORY = "memory"  # it needs more than the process may have: the process ends


class Reply(msgspec.Struct, array_like=True):
    """The rendering: stretches of text, and for each whether it is a special token."""

    fault: Fault = Fault.NONE
    error: str = ""
    variables: list[str] = []  # that the template reads
    num_chars: int = 0  # of the rendering
    parts: list[tuple[str, bool]] = []


def send(channel: socket.socket, frame: bytes) -> None:
    """Raises TimeoutError or OSError."""
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
