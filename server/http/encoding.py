"""Encodes JSON and server-sent events. Long parts are encoded while they are sent, so no single call takes long.

The long parts of a value are `LongList` and `LongText` objects. The rest is encoded in one call, with a hole for each
long part. A hole is a zero byte, which JSON never contains unescaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import batched
from typing import Any

import msgspec

HOLE = b"\x00"
ITEMS = 32  # items of a list that are encoded in one call
CHARS = 64 * 1024  # characters of a text that are encoded in one call
DONE = b"data: [DONE]\n\n"
encode_json = msgspec.json.Encoder().encode


class LongList:
    """A list whose items are created while they are encoded. The items have no long parts."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = items

    def pieces(self) -> Iterator[bytes]:
        before = b"["
        for batch in batched(self._items, ITEMS):
            yield before + encode_json(batch)[1:-1]
            before = b","
        yield b"]" if before == b"," else b"[]"


class NestedList(LongList):
    """A list whose items may hold long parts themselves."""

    def pieces(self) -> Iterator[bytes]:
        before = b"["
        for item in self._items:
            yield before
            yield from json_pieces(item)
            before = b","
        yield b"]" if before == b"," else b"[]"


class LongText:
    """A string that is encoded slice by slice."""

    def __init__(self, text: str) -> None:
        self._text = text

    def pieces(self) -> Iterator[bytes]:
        yield b'"'
        for start in range(0, len(self._text), CHARS):
            yield encode_json(self._text[start : start + CHARS])[1:-1]
        yield b'"'


def list_of(items: Iterable[Any], count: int) -> list[Any] | LongList:
    """A list of `count` items. A list of up to ITEMS items is created immediately."""
    return list(items) if count <= ITEMS else LongList(items)


def json_pieces(value: Any) -> Iterator[bytes]:
    """Yields the JSON of a value, with its long parts in pieces."""
    long_parts: list[LongList | LongText] = []

    def leave_hole(part: Any) -> msgspec.Raw:
        if not isinstance(part, LongList | LongText):
            raise TypeError(f"no JSON for {type(part).__name__}")
        long_parts.append(part)
        return msgspec.Raw(HOLE)

    first, *others = msgspec.json.encode(value, enc_hook=leave_hole).split(HOLE)
    yield first
    for part, after in zip(long_parts, others, strict=True):
        yield from part.pieces()
        yield after


def event_pieces(value: Any, name: str = "") -> Iterator[bytes]:
    """Yields the pieces of a server-sent event with this value. The event may have a name."""
    yield f"event: {name}\ndata: ".encode() if name else b"data: "
    yield from json_pieces(value)
    yield b"\n\n"


def event(data: bytes) -> bytes:
    """A server-sent event. `data` must have no line break."""
    return b"data: " + data + b"\n\n"


class ChunkTemplate:
    """A chunk with a hole for a string. The rest of the chunk is encoded once for the whole stream, which takes a third
    of the time (`scripts/lab/results/decisions.md`)."""

    __slots__ = ("_after", "_before")

    HOLE = "\x00hole\x00"

    def __init__(self, chunk: dict[str, Any]) -> None:
        """`chunk` holds ChunkTemplate.HOLE as the value of the field that changes."""
        before, hole, after = event(encode_json(chunk)).partition(encode_json(self.HOLE))
        if not hole:
            raise ValueError(f"the chunk has no hole: {chunk=}")
        self._before = before
        self._after = after

    def fill(self, text: str) -> bytes:
        return self._before + encode_json(text) + self._after
