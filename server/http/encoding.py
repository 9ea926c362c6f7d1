"""Encodes JSON and server-sent events. Long lists are encoded while they are sent, so no single call takes long.

The long lists of a value are `LongList` objects. The rest is encoded in one call, with a hole for each of
them. A hole is a zero byte, which JSON never contains unescaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import batched
from typing import Any

import msgspec

HOLE = b"\x00"
ITEMS = 32  # items of a list that are encoded in one call
DONE = b"data: [DONE]\n\n"
encode_json = msgspec.json.Encoder().encode


class LongList:
    """A list whose items are created while they are encoded. The items hold no such lists."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = items

    def pieces(self) -> Iterator[bytes]:
        before = b"["
        for batch in batched(self._items, ITEMS):
            yield before + encode_json(batch)[1:-1]
            before = b","
        yield b"]" if before == b"," else b"[]"


class NestedList(LongList):
    """A list whose items may hold such lists themselves."""

    def pieces(self) -> Iterator[bytes]:
        before = b"["
        for item in self._items:
            yield before
            yield from json_pieces(item)
            before = b","
        yield b"]" if before == b"," else b"[]"


def list_of(items: Iterable[Any], count: int) -> list[Any] | LongList:
    """A list of `count` items. A list of up to ITEMS items is created immediately."""
    return list(items) if count <= ITEMS else LongList(items)


def json_pieces(value: Any) -> Iterator[bytes]:
    """Yields the JSON of a value, with its long lists in pieces."""
    long_lists: list[LongList] = []

    def leave_hole(part: Any) -> msgspec.Raw:
        if not isinstance(part, LongList):
            raise TypeError(f"no JSON for {type(part).__name__}")
        long_lists.append(part)
        return msgspec.Raw(HOLE)

    first, *others = msgspec.json.encode(value, enc_hook=leave_hole).split(HOLE)
    yield first
    for part, after in zip(long_lists, others, strict=True):
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
