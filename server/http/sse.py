"""Server-sent events, and the JSON of chunks that differ only in their text."""

from __future__ import annotations

from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"

encode_json = msgspec.json.Encoder().encode


def event(data: bytes) -> bytes:
    """An event with this data, which has no line break."""
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
