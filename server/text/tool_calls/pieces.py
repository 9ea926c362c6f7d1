"""A parser's result, in the order of the text: content, and additions to tool calls."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """An addition to the content."""

    text: str
    start: int  # the place of its first character in the sequence's whole text


@dataclass(frozen=True, slots=True)
class CallDelta:
    """An addition to a tool call. `name` is set in the first delta of a call and in no other."""

    index: int  # of the call within its message, from 0
    name: str | None
    arguments: str  # joined over the deltas, they are the call's arguments


@dataclass(frozen=True, slots=True)
class Reasoning:
    """An addition to the reasoning before the answer (`server.text.reasoning`)."""

    text: str


AnswerPiece = Content | CallDelta
Piece = Reasoning | AnswerPiece


class Pieces:
    """Collects pieces. Adjacent pieces of one kind become one piece."""

    __slots__ = ("_is_placed", "_pieces", "_texts", "num_calls")

    def __init__(self) -> None:
        self._pieces: list[AnswerPiece] = []
        self._texts: list[str] = []  # of the piece that still grows: the last call's arguments, or content
        self._is_placed = True  # False: the start of the last piece, which is content, is not known yet
        self.num_calls = 0

    def add_content(self, text: str) -> None:
        """`place` must follow when the end of the text has been read."""
        if not text:
            return
        if not self._pieces or isinstance(self._pieces[-1], CallDelta):
            self._close()
            self._pieces.append(Content("", 0))
            self._is_placed = False
        self._texts.append(text)

    def place(self, end: int) -> None:
        """The text has been read up to the index `end`. Content that has been added in this step ends there."""
        if not self._is_placed:
            self._pieces[-1] = Content("", end - sum(map(len, self._texts)))
            self._is_placed = True

    def begin_call(self, name: str) -> None:
        """Closes an open call and begins the next one."""
        self._close()
        self._pieces.append(CallDelta(self.num_calls, name, ""))
        self.num_calls += 1

    def add_arguments(self, text: str) -> None:
        if not self._pieces or isinstance(self._pieces[-1], Content):
            self._close()
            self._pieces.append(CallDelta(self.num_calls - 1, None, ""))
        self._texts.append(text)

    def withdraw_call(self) -> bool:
        """Removes the last call, unless a part of it has been taken. Returns whether it is removed."""
        last = self._pieces[-1] if self._pieces else None
        if not (isinstance(last, CallDelta) and last.name is not None):
            return False
        self._pieces.pop()
        self.num_calls -= 1
        before = self._pieces[-1] if self._pieces else None
        self._texts = [before.text if isinstance(before, Content) else before.arguments] if before else []
        return True

    def take(self) -> list[AnswerPiece]:
        self._close()
        taken, self._pieces = self._pieces, []
        return [piece for piece in taken if isinstance(piece, CallDelta) or piece.text]

    def _close(self) -> None:
        text = "".join(self._texts)
        self._texts.clear()
        if self._pieces and text:
            last = self._pieces[-1]
            if isinstance(last, Content):
                self._pieces[-1] = Content(text, last.start)
            else:
                self._pieces[-1] = CallDelta(last.index, last.name, text)
