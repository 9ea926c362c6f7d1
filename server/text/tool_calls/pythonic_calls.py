"""Llama 3.2's calls as a Python list: `[f(a=1, b="x"), g()]`.

Arguments are named literals. They are converted to the JSON object that clients expect, piece by piece. A call has
begun when its first argument's name or its closing parenthesis has been read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from server.text.tool_calls.literals import LiteralReader
from server.text.tool_calls.parser import MAX_DEPTH, CallParser

MAX_WORD_CHARS = 256  # of a call's name or of a keyword
_NAME = re.compile(r"[A-Za-z0-9_.:/-]")


class PythonicCallParser(CallParser):
    """Reads calls written as a Python list, such as `[f(a=1), g()]`."""

    opening = "["

    def __init__(self, names: Collection[str], **options: Any) -> None:
        super().__init__(names, **options)
        self._word = ""  # a call's name, or a keyword, as far as it has been read
        self._name: str | None = None  # of a call that has not begun yet; None: the call has begun
        self._keywords: set[str] = set()
        self._value = LiteralReader(max_depth=MAX_DEPTH)
        self._is_in_value = False  # where the arguments broke off

    def _end_text_after_call(self) -> None:
        if self._read == self._read_next_call:
            self._held.clear()

    def _begin_rest(self) -> str:
        self._is_in_value = self._read == self._read_value
        return self._value.begin_rest() if self._is_in_value else ', "'

    def _end_rest(self) -> str:
        return (self._value.end_rest() if self._is_in_value else '": null') + "}"

    def _begin(self) -> None:
        self._word = ""
        self._read = self._read_name

    def _read_name(self, text: str, at: int) -> int:
        """Reads from the list's `[`, or the comma after a call, to the parenthesis after a name."""
        char = text[at]
        if char == "(" and self._word in self._names:
            self._name, self._word = self._word, ""
            self._keywords = set()
            self._read = self._read_keyword
        elif _NAME.match(char) and len(self._word) < MAX_WORD_CHARS:
            self._word += char
        elif self._word or not char.isspace():
            self._fail()
            return at
        return self._hold(char, at)

    def _read_keyword(self, text: str, at: int) -> int:
        """Reads from a call's `(`, or the comma after an argument, to the end of a keyword."""
        char = text[at]
        if char == ")" and not self._word:
            return self._read_closing(at)
        if char == "=" or (self._word and char.isspace()):
            self._read = self._read_equals
            return at
        if not char.isspace():
            self._word += char
            if len(self._word) > MAX_WORD_CHARS or not self._word.isidentifier():
                return self._break_at(at)
        return self._hold(char, at)

    def _read_equals(self, text: str, at: int) -> int:
        char = text[at]
        if char.isspace():
            return self._hold(char, at)
        if char != "=" or not self._word or self._word in self._keywords:
            return self._break_at(at)
        self._begin_call()
        self._held.clear()
        self._pieces.add_arguments(f"{', ' if self._keywords else '{'}{json.dumps(self._word, ensure_ascii=False)}: ")
        self._keywords.add(self._word)
        self._value = LiteralReader(max_depth=MAX_DEPTH)
        self._read = self._read_value
        return at + 1

    def _read_value(self, text: str, at: int) -> int:
        end, json_text = self._value.read_on(text, at)
        self._pieces.add_arguments(json_text)
        if self._value.broken:
            self._break(text[at:end])
        elif self._value.done:
            self._read = self._read_next_argument
        return end

    def _read_next_argument(self, text: str, at: int) -> int:
        char = text[at]
        if char == ")":
            return self._read_closing(at)
        if char == ",":
            self._word = ""
            self._read = self._read_keyword
        elif not char.isspace():
            return self._break_at(at)
        return self._hold(char, at)

    def _read_closing(self, at: int) -> int:
        self._begin_call()
        self._pieces.add_arguments("}" if self._keywords else "{}")
        self._complete()
        self._end_call()
        if not self.is_full:
            self._read = self._read_next_call
        return at + 1

    def _read_next_call(self, text: str, at: int) -> int:
        """Reads the comma or the end of the list after a call."""
        char = text[at]
        if char == "]":
            self._end_call()
            return at + 1
        if char == ",":
            self._begin()
        elif not char.isspace():
            self._fail()
            return at
        return self._hold(char, at)

    def _begin_call(self) -> None:
        if self._name is not None:
            self._commit(self._name)
            self._name = None

    def _break_at(self, at: int) -> int:
        """Handles a character that is not allowed here, in a call that has begun or has not."""
        if self._name is not None:
            self._fail()
        else:
            self._break("")
        return at

    def _hold(self, char: str, at: int) -> int:
        self._held.append(char)
        return at + 1
