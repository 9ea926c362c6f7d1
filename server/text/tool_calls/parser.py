"""What the formats of tool calls share: content is passed on, and what may begin a call is held back.

A parser reads a text in pieces of any size and does a bounded amount of work for each character. What it returns does
not depend on how the text was cut. Text that began like a call and turns out to be none is released as content, whole;
reading goes on after it, so no character is read twice.

A call has begun when a name of `names` and the start of its arguments have been read. From then on its arguments are
passed on as they come. Where they break the format's rules, the rest of the text belongs to them as it is: a client
sees that they do not parse.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import ClassVar

from server.text.tool_calls.matching import end_of_run
from server.text.tool_calls.pieces import Piece, Pieces

PYTHON_TAG = "<|python_tag|>"  # Llama 3.1 writes it before calls; a text has it where special tokens are shown
MAX_DEPTH = 64  # lists and objects in each other
_SEPARATORS = re.compile(r"[\s;,]*")
_DISPENSABLE = re.compile(rf"(?:[\s;,]|{re.escape(PYTHON_TAG)})*")


class CallParser:
    """One text on its way through a format. Subclasses read a call, from its opening character on.

    Args:
        names: the tools that may be called.
        most_calls: after so many calls the rest of the text is dropped.
    """

    opening: ClassVar[str]  # the character with which a call, or a list of calls, begins

    def __init__(self, names: Collection[str], *, most_calls: int | None = None) -> None:
        self._names = names
        self._most_calls = most_calls
        self._pieces = Pieces()
        self._held: list[str] = []  # content, unless a call begins
        self._tag = ""  # the beginning of a python tag that has been read; held, too
        self._starts = re.compile(rf"[<{re.escape(self.opening)}]")
        self._read: Callable[[str, int], int] = self._read_gap  # what reads the text from an index on

    @property
    def num_calls(self) -> int:
        """How many calls have begun."""
        return self._pieces.num_calls

    @property
    def is_full(self) -> bool:
        """`most_calls` are complete: nothing that follows counts."""
        return self._read == self._drop

    def push(self, text: str) -> None:
        at = 0
        while at < len(text):
            at = self._read(text, at)

    def take(self) -> list[Piece]:
        """What has become certain since the last call."""
        return self._pieces.take()

    def finish(self) -> None:
        """Nothing follows: what was held back is certain, too. White space after the last call is dropped."""
        self._end_call_early()
        self._held.append(self._tag)
        if not (self.num_calls and _DISPENSABLE.fullmatch("".join(self._held))):
            self._release()

    def _begin(self) -> None:
        """The opening character has been read and is held: sets `_read` to what reads the call."""
        raise NotImplementedError

    def _end_call_early(self) -> None:
        """The text is over: deals with what is held where it is a part of a call that has begun."""

    def _commit(self, name: str) -> None:
        """A call begins; what is held was its beginning."""
        self._held.clear()
        self._pieces.begin_call(name)

    def _fail(self) -> None:
        """What is held is content, and so is what follows."""
        self._release()
        self._read = self._read_content

    def _end_call(self) -> None:
        """The call is complete, and what is held was its end."""
        self._held.clear()
        full = self._most_calls is not None and self.num_calls >= self._most_calls
        self._read = self._drop if full else self._read_gap

    def _release(self) -> None:
        self._pieces.add_content("".join(self._held))
        self._held.clear()

    def _read_content(self, text: str, at: int) -> int:
        found = self._starts.search(text, at)
        end = found.start() if found else len(text)
        self._pieces.add_content(text[at:end])
        if found:
            self._read = self._read_gap
        return end

    def _read_gap(self, text: str, at: int) -> int:
        """White space, separators and python tags, at the start, after a call, or where content has `<` or a start."""
        if self._tag:
            return self._read_tag(text, at)
        end = end_of_run(_SEPARATORS, text, at)
        self._held.append(text[at:end])
        if end < len(text):
            if text[end] == "<":
                self._tag = "<"
                return end + 1
            if text[end] == self.opening:
                self._held.append(self.opening)
                self._begin()
                return end + 1
            self._fail()
        return end

    def _read_tag(self, text: str, at: int) -> int:
        if text[at] != PYTHON_TAG[len(self._tag)]:
            self._held.append(self._tag)
            self._tag = ""
            self._fail()
            return at
        self._tag += text[at]
        if self._tag == PYTHON_TAG:
            self._held.append(self._tag)
            self._tag = ""
        return at + 1

    def _read_broken_arguments(self, text: str, at: int) -> int:
        self._pieces.add_arguments(text[at:])
        return len(text)

    def _drop(self, text: str, at: int) -> int:
        return len(text)
