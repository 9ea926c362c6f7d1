"""The common part of the tool-call formats. Content is passed on; text that may begin a call is held back.

A parser reads a text in pieces of any size and does a bounded amount of work for each character. Text that begins like
a call but is not a call is released as content, unchanged. Reading continues after it, so no character is read twice.
The marks around calls are dropped with them: python tags, the fences of Markdown, and a format's own brackets and tags.

A call has begun when a name of `names` and the start of its arguments have been read. From then on its arguments can be
taken. They are JSON: what the model wrote in Python's form is converted. A call can end too early in two ways.

- The model's text breaks the rules of the format, or ends inside the arguments. Then the call is withdrawn, and its
  text is content. A stream may have sent a part of the call, which cannot be withdrawn. Then the rest of the text is
  put into the arguments as a string, so that they are a JSON object, too.
- A limit or a stop string cuts the text. Then the call is withdrawn and leaves no content, and neither does held-back
  text that may begin a call. What a stream has sent of the call stays as it is: the arguments do not parse, and the
  finish reason says why. They are not completed, because a client might then run a call that the model never wrote.
  If a call must be made and a limit cuts it, the part that was written stays, so that the answer is not empty.

So the result depends on the cuts of the text only if a call is incomplete and has been taken in part.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import ClassVar

from server.text.tool_calls.literals import end_of_run, escaped
from server.text.tool_calls.pieces import AnswerPiece, Pieces

PYTHON_TAG = "<|python_tag|>"  # Llama 3.1 writes it before calls; it is in the text if special tokens are shown
FENCE = "```"
MAX_FENCE_CHARS = 24  # with the name of a language
MAX_DEPTH = 64  # of nested lists and objects
_SEPARATORS = re.compile(r"[\s;,]*")
_LANGUAGE = re.compile(r"\w")


class CallParser:
    """Parses one text in one format. Subclasses read a call, from its opening character on.

    Args:
        names: the tools that may be called.
        most_calls: after this number of calls the rest of the text is dropped.
        must_call: the text is calls and nothing else.
    """

    opening: ClassVar[str]  # the character with which a call, or a list of calls, begins
    # marks that may stand before a call -> the marks that may stand after it; "": none
    marks: ClassVar[dict[str, str]] = {PYTHON_TAG: "", FENCE: FENCE}

    def __init__(self, names: Collection[str], *, most_calls: int | None = None, must_call: bool = False) -> None:
        self._names = names
        self._must_call = must_call
        self._most_calls = most_calls
        self._pieces = Pieces()
        self._held: list[str] = []  # content, unless a call begins
        self._mark = ""  # the part of a mark that has been read; held back too
        self._raw: list[str] | None = None  # the text of a call whose arguments are incomplete
        self._has_half_call = False  # a part of it is in the answer
        self._opened: set[str] = set()  # the closing marks of those that are held back
        self._closing: set[str] = set()  # the closing marks of those around calls
        self._in_text_fence = False  # a fence is open that is content
        self._all_marks = {mark for pair in self.marks.items() for mark in pair if mark}
        self._num_chars = 0  # of the text before the last `push`, then of the whole text
        starts = "".join({mark[0] for mark in self._all_marks} | {self.opening})
        self._starts = re.compile(f"[{re.escape(starts)}]")
        self._read: Callable[[str, int], int] = self._read_gap  # reads the text from an index on

    @property
    def num_calls(self) -> int:
        """The number of calls that have begun, without one that a limit or a stop string has cut."""
        return self._pieces.num_calls - self._has_half_call

    @property
    def is_full(self) -> bool:
        """Whether `most_calls` calls are complete. Then the rest of the text is ignored."""
        return self._read == self._drop

    def push(self, text: str) -> None:
        at = 0
        while at < len(text):
            start, at = at, self._read(text, at)
            if self._raw is not None:
                self._raw.append(text[start:at])
            self._pieces.place(self._num_chars + at)
        self._num_chars += len(text)

    def take(self) -> list[AnswerPiece]:
        """The pieces that have become certain since the last `take`, and the beginning of a call."""
        return self._pieces.take()

    def finish(self, *, cut: bool = False, by_limit: bool = False) -> None:
        """Ends the text. `cut`: by a limit or a stop string, not by the model. `by_limit`: by a limit.

        Held-back text is released if the model has ended the text. Spaces and marks after a last call are dropped.
        """
        keeps_half = by_limit and self._must_call
        if self._raw is not None or self._read == self._read_rest:
            self._finish_call(cut=cut, keeps_half=keeps_half)
        elif keeps_half and not self.num_calls and (name := self._certain_name()) is not None:
            self._pieces.begin_call(name)
            self._has_half_call = True
            self._held.clear()
        else:
            self._finish_text(cut=cut)
        self._release()
        self._pieces.place(self._num_chars)

    def _certain_name(self) -> str | None:
        """The name of the call that the held-back text begins. None: it may be several."""
        held = "".join(self._held)
        found = [name for name in self._names if len(self._names) == 1 or f'"{name}"' in held]
        return found[0] if held and len(found) == 1 else None

    def _finish_call(self, *, cut: bool, keeps_half: bool) -> None:
        """Ends the text within the arguments of a call."""
        if cut:
            self._has_half_call = keeps_half or self._raw is None or not self._pieces.withdraw_call()
            self._held.clear()
            return
        if self._raw is not None:
            self._break("")
        if self._read == self._read_rest:
            self._pieces.add_arguments(self._end_rest())

    def _finish_text(self, *, cut: bool) -> None:
        """Ends the text outside arguments. Clears the held-back text if it is not content."""
        self._end_text_after_call()
        is_gap = self._read == self._read_gap and not self._mark and not any(self._opened)
        self._held.append(self._mark)
        is_space = _SEPARATORS.fullmatch("".join(self._held)) is not None
        if (self.num_calls and (is_space or is_gap)) or (cut and not is_space):
            self._held.clear()

    def _begin(self) -> None:
        """Sets `_read` to the method that reads the call. The opening character has been read and is held back."""
        raise NotImplementedError

    def _begin_rest(self) -> str:
        """Begins a string in the arguments that are being read. The rest of the text goes into it."""
        raise NotImplementedError

    def _end_rest(self) -> str:
        """Ends that string and the arguments."""
        raise NotImplementedError

    def _end_text_after_call(self) -> None:
        """Handles the end of the text: the held-back text may be the end of a call with complete arguments."""

    def _commit(self, name: str) -> None:
        """Begins a call. The held-back text was its beginning."""
        self._raw = self._held
        self._held = []
        self._pieces.begin_call(name)

    def _complete(self) -> None:
        """The arguments of the call are complete."""
        self._raw = None
        self._closing |= self._opened
        self._opened.clear()

    def _break(self, text: str) -> None:
        """The arguments of the call go on with what is not allowed there. `text` is what this step has read of it."""
        raw, self._raw = self._raw or [], None
        if self._pieces.withdraw_call():
            self._held = [*raw, text]  # all of it
            self._fail()
        else:
            self._pieces.add_arguments(self._begin_rest() + escaped("".join(self._held)))
            self._held.clear()
            self._read = self._read_rest

    def _fail(self) -> None:
        """Releases the held-back text as content, and reads on in content. A call may still begin there. A mark that
        would have closed the calls before it is content."""
        self._release()
        self._closing.clear()
        self._read = self._read_content

    def _end_call(self) -> None:
        """Completes the call. The held-back text was its end."""
        self._held.clear()
        full = self._most_calls is not None and self.num_calls >= self._most_calls
        self._read = self._drop if full else self._read_gap

    def _release(self) -> None:
        self._in_text_fence |= FENCE in self._opened
        self._opened.clear()
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
        """Reads white space, separators and marks: at the start, after a call, and where content has a character with
        which a mark or a call begins."""
        if self._mark:
            return self._read_mark(text, at)
        end = end_of_run(_SEPARATORS, text, at)
        self._held.append(text[at:end])
        if end == len(text):
            return end
        if text[end] == self.opening:
            self._held.append(self.opening)
            self._begin()
            return end + 1
        return self._read_mark(text, end)

    def _read_mark(self, text: str, at: int) -> int:
        mark = self._mark
        if mark.startswith(FENCE):
            if len(mark) < MAX_FENCE_CHARS and _LANGUAGE.match(text[at]):
                self._mark += text[at]
                return at + 1
            self._hold_mark()
            return at
        mark += text[at]
        if mark in self._closing:
            self._closing.remove(mark)
            self._held.clear()
            self._mark = ""
        elif mark == FENCE and self._in_text_fence:
            self._held.append(FENCE)
            self._mark = ""
            self._fail()
            self._in_text_fence = False
        elif mark == FENCE or (mark not in self.marks and any(each.startswith(mark) for each in self._all_marks)):
            self._mark = mark
        elif mark in self.marks:
            self._mark = mark
            self._hold_mark()
        else:
            self._held.append(self._mark)
            self._mark = ""
            self._fail()
            return at
        return at + 1

    def _hold_mark(self) -> None:
        """Holds back a whole mark."""
        self._opened.add(self.marks[FENCE if self._mark.startswith(FENCE) else self._mark])
        self._held.append(self._mark)
        self._mark = ""

    def _read_rest(self, text: str, at: int) -> int:
        self._pieces.add_arguments(escaped(text[at:]))
        return len(text)

    def _drop(self, text: str, at: int) -> int:
        return len(text)
