"""A parser's result, in the order of the text: content, and additions to tool calls."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallDelta:
    """An addition to a tool call. `name` is set in the first delta of a call and in no other."""

    index: int  # of the call within its message, from 0
    name: str | None
    arguments: str  # joined over the deltas, they are the call's arguments


Piece = str | CallDelta  # a string is content


class Pieces:
    """Collects pieces. Adjacent pieces of one kind become one piece."""

    __slots__ = ("_num_calls", "_pieces", "_texts")

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._texts: list[str] = []  # of the piece that still grows: the last call's arguments, or content
        self._num_calls = 0

    @property
    def num_calls(self) -> int:
        return self._num_calls

    def add_content(self, text: str) -> None:
        if not text:
            return
        if not self._pieces or isinstance(self._pieces[-1], CallDelta):
            self._close()
            self._pieces.append("")
        self._texts.append(text)

    def begin_call(self, name: str) -> None:
        self._close()
        self._pieces.append(CallDelta(self._num_calls, name, ""))
        self._num_calls += 1

    def add_arguments(self, text: str) -> None:
        """Adds to the arguments of the last call."""
        if not self._pieces or isinstance(self._pieces[-1], str):
            self._close()
            self._pieces.append(CallDelta(self._num_calls - 1, None, ""))
        self._texts.append(text)

    def take(self) -> list[Piece]:
        self._close()
        taken, self._pieces = self._pieces, []
        return [piece for piece in taken if piece != ""]

    def _close(self) -> None:
        text = "".join(self._texts)
        self._texts.clear()
        if self._pieces and text:
            last = self._pieces[-1]
            self._pieces[-1] = text if isinstance(last, str) else CallDelta(last.index, last.name, text)
