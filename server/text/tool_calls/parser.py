"""The common part of the tool-call formats. Content is passed on; text that may begin a call is held back.

A parser reads a text in pieces of any size and does a bounded amount of work for each character. Its result does not
depend on how the text was cut. Text that begins like a call but is not a call is released as content, unchanged.
Reading continues after it, so no character is read twice.

A call has begun when a name of `names` and the start of its arguments have been read. From then on its arguments are
passed on immediately. If they break the format's rules, the rest of the text is added to them unchanged. The client
then sees that the arguments do not parse.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import ClassVar

from server.text.tool_calls.matching import end_of_run
from server.text.tool_calls.pieces import Piece, Pieces

PYTHON_TAG = "<|python_tag|>"  # Llama 3.1 writes it before calls; it is in the text if special tokens are shown
MAX_DEPTH = 64  # of nested lists and objects
_SEPARATORS = re.compile(r"[\s;,]*")
_DISPENSABLE = re.compile(rf"(?:[\s;,]|{re.escape(PYTHON_TAG)})*")


class CallParser:
    """Parses one text in one format. Subclasses read a call, from its opening character on.

    Args:
        names: the tools that may be called.
        most_calls: after this number of calls the rest of the text is dropped.
    """

    opening: ClassVar[str]  # the character with which a call, or a list of calls, begins

    def __init__(self, names: Collection[str], *, most_calls: int | None = None) -> None:
        self._names = names
        self._most_calls = most_calls
        self._pieces = Pieces()
        self._held: list[str] = []  # content, unless a call begins
        self._tag = ""  # the part of a python tag that has been read; held back too
        self._num_chars = 0  # of the text before the last `push`, then of the whole text
        self._starts = re.compile(rf"[<{re.escape(self.opening)}]")
        self._read: Callable[[str, int], int] = self._read_gap  # reads the text from an index on

    @property
    def num_calls(self) -> int:
        """The number of calls that have begun."""
        return self._pieces.num_calls

    @property
    def is_full(self) -> bool:
        """Whether `most_calls` calls are complete. Then the rest of the text is ignored."""
        return self._read == self._drop

    def push(self, text: str) -> None:
        at = 0
        while at < len(text):
            at = self._read(text, at)
            self._pieces.place(self._num_chars + at)
        self._num_chars += len(text)

    def take(self) -> list[Piece]:
        """The pieces that have become certain since the last `take`."""
        return self._pieces.take()

    def finish(self) -> None:
        """Ends the text and releases the held-back text. Spaces, separators and tags after a last call are dropped."""
        self._end_call_early()
        self._held.append(self._tag)
        if not (self.num_calls and _DISPENSABLE.fullmatch("".join(self._held))):
            self._release()
            self._pieces.place(self._num_chars)

    def _begin(self) -> None:
        """Sets `_read` to the method that reads the call. The opening character has been read and is held back."""
        raise NotImplementedError

    def _end_call_early(self) -> None:
        """Handles the end of the text inside a call that has begun: the held-back text may be a part of that call."""

    def _commit(self, name: str) -> None:
        """Begins a call. The held-back text was its beginning."""
        self._held.clear()
        self._pieces.begin_call(name)

    def _fail(self) -> None:
        """Releases the held-back text as content, and reads on in content. A call may still begin there."""
        self._release()
        self._read = self._read_content

    def _end_call(self) -> None:
        """Completes the call. The held-back text was its end."""
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
        """Reads white space, separators and python tags: at the start, after a call, and where content has `<` or the
        opening character."""
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
