"""Calls as JSON, such as Llama 3's: `{"name": "f", "parameters": {"a": 1}}`, several of them separated by `;` or in a
list.

"arguments" is read like "parameters". The keys may have any order, and "type" and "id" are also allowed. An object is
not a call if it has another key, if its name is not that of a tool, or if its arguments are not an object. The
arguments may be a string with the JSON of an object. They are then sent when the string is complete.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any, ClassVar, NamedTuple

from server.text.tool_calls.literals import Expects, LiteralReader, as_json
from server.text.tool_calls.parser import MAX_DEPTH, CallParser

ARGUMENT_KEYS = ("parameters", "arguments")
OTHER_KEYS = ("type", "id")
_IN_STRING = (Expects.STRING, Expects.ESCAPE)
CALL_TAG, CALL_END_TAG = "<tool_call>", "</tool_call>"


class WrittenForm(NamedTuple):
    """The form in which a model writes calls: `start`, then calls separated by `between`, then `end`. A call is
    `before`, an object whose field `key` has the arguments, and `after`."""

    key: str
    start: str = ""
    before: str = ""
    between: str = ""
    after: str = ""
    end: str = ""


class JsonCallParser(CallParser):
    """Reads calls as JSON. A call's `arguments` are the model's own characters where these are JSON."""

    written: ClassVar[WrittenForm] = WrittenForm("parameters", between="; ")
    opening = "{"
    marks = CallParser.marks | {"[": "]"}

    def __init__(self, names: Collection[str], **options: Any) -> None:
        super().__init__(names, **options)
        self._value = LiteralReader(max_depth=MAX_DEPTH)  # of the arguments
        self._early_json = ""  # its JSON up to now, before the call is certain
        self._begin()
        self._read = self._read_gap

    def _begin(self) -> None:
        self._scanner = LiteralReader(max_depth=MAX_DEPTH, keeps_json=True, is_strict=True, opened="{")
        self._string: list[str] = []  # the raw text of the last string in the object
        self._key: str | None = None  # the last one read
        self._name: str | None = None
        self._arguments: str | None = None  # read before the call was certain
        self._read = self._read_object

    def _begin_rest(self) -> str:
        return self._value.begin_rest()

    def _end_rest(self) -> str:
        return self._value.end_rest()

    def _end_text_after_call(self) -> None:
        if self._read == self._read_end:
            self._held.clear()

    def _read_object(self, text: str, at: int) -> int:
        """Reads an object until it is certain whether it is a call."""
        scanner, expected = self._scanner, self._scanner.expects
        if expected is Expects.VALUE and self._key in ARGUMENT_KEYS and not text[at].isspace():
            return self._begin_arguments(text[at], at)
        end, json_text = scanner.read(text, at)
        if scanner.broken:
            self._fail()
            return at
        self._note_string(expected, json_text)
        may_be_call = self._may_be_call(expected)
        if may_be_call and self._name is not None and self._arguments is not None:
            self._add_whole_call(self._name, self._arguments)
            return end
        self._held.append(text[at:end])
        if scanner.done:
            self._fail()
        elif not may_be_call:
            self._become_other_object()
        return end

    def _note_string(self, expected: Expects, json_text: str) -> None:
        if expected not in _IN_STRING:
            if self._scanner.expects is Expects.STRING:
                self._string.clear()
        elif self._scanner.expects in _IN_STRING:
            self._string.append(json_text)

    def _may_be_call(self, expected: Expects) -> bool:
        """Whether the object can still be a call. `expected` is the scanner's state before its last read."""
        scanner = self._scanner
        if scanner.depth > 1:
            return False
        if expected is Expects.STRING and scanner.expects is Expects.COLON:
            self._key = _decoded("".join(self._string))
            if self._key in ARGUMENT_KEYS:
                return self._arguments is None
            return self._key in OTHER_KEYS or (self._key == "name" and self._name is None)
        if expected is Expects.VALUE and scanner.expects is not Expects.VALUE:
            return scanner.expects is Expects.STRING or self._key != "name"
        if expected is Expects.STRING and scanner.expects is Expects.COMMA_OR_END and self._key == "name":
            self._name = _decoded("".join(self._string))
            return self._name in self._names
        return True

    def _become_other_object(self) -> None:
        self._release()
        self._read = self._read_other_object

    def _read_other_object(self, text: str, at: int) -> int:
        """Reads an object that is not a call. It is content, and the objects in it are content too."""
        end, _ = self._scanner.read(text, at)
        self._pieces.add_content(text[at:end])
        if self._scanner.broken or self._scanner.done:
            self._read = self._read_content
        return end

    def _begin_arguments(self, char: str, at: int) -> int:
        """Begins to read the value of the arguments. `char` is its first character, which is not read yet."""
        if char not in '{"':
            self._become_other_object()
            return at
        self._value = LiteralReader(max_depth=MAX_DEPTH, keeps_json=True)
        if self._name is not None and char == "{":
            self._commit(self._name)
            self._read = self._read_arguments
        else:
            self._early_json = ""
            self._read = self._read_early_arguments
        return at

    def _read_arguments(self, text: str, at: int) -> int:
        """Reads the arguments of a call that has begun, up to their closing brace."""
        end, json_text = self._value.read_on(text, at)
        self._pieces.add_arguments(json_text)
        if self._value.broken:
            self._break(text[at:end])
        elif self._value.done:
            self._complete()
            self._scanner.skip_value()
            self._read = self._read_end
        return end

    def _read_early_arguments(self, text: str, at: int) -> int:
        """Reads arguments before the call is certain: its name is not known, or they are in a string."""
        end, json_text = self._value.read_on(text, at)
        self._early_json += json_text
        if self._value.done:
            self._scanner.skip_value()
            self._arguments = self._early_arguments()
            if self._name is not None and self._arguments is not None:
                self._add_whole_call(self._name, self._arguments)
                return end
        self._held.append(text[at:end])
        if self._value.broken:
            self._fail()
        elif self._value.done and self._arguments is None:
            self._become_other_object()
        elif self._value.done:
            self._read = self._read_object
        return end

    def _early_arguments(self) -> str | None:
        """The arguments' JSON; None if they are not an object."""
        json_text: str | None = self._early_json
        if json_text and json_text.startswith('"'):
            json_text = as_json(json.loads(json_text), max_depth=MAX_DEPTH)
        return json_text if json_text and json_text.startswith("{") else None

    def _add_whole_call(self, name: str, arguments: str) -> None:
        self._commit(name)
        self._pieces.add_arguments(arguments)
        self._complete()
        self._read = self._read_end

    def _read_end(self, text: str, at: int) -> int:
        """Reads the rest of the call's object after the arguments. The object's closing brace may be missing."""
        end, _ = self._scanner.read(text, at)
        if self._scanner.broken:
            self._end_call_without_brace()
        elif self._scanner.done:
            self._end_call()
        else:
            self._held.append(text[at:end])
        return end

    def _end_call_without_brace(self) -> None:
        held = "".join(self._held)
        self._end_call()
        if held.strip() and not self.is_full:
            self._held.append(held)
            self._fail()


class HermesCallParser(JsonCallParser):
    """Reads calls in the form of Hermes 2 Pro and 3 and of Llama-3-Groq-Tool-Use: JSON between `<tool_call>` and
    `</tool_call>`. The tags may be missing: some tokenizers have them as special tokens, which are not shown."""

    written = WrittenForm("arguments", before=f"{CALL_TAG}\n", between="\n", after=f"\n{CALL_END_TAG}")
    marks = JsonCallParser.marks | {CALL_TAG: CALL_END_TAG}


class XlamCallParser(HermesCallParser):
    """Reads calls in the form of Salesforce's Llama-xLAM-2: one JSON list of calls. What `hermes` reads is read too, as
    in vLLM."""

    written = WrittenForm("arguments", start="[", between=", ", end="]")


def _decoded(raw: str) -> str:
    return str(json.loads(f'"{raw}"'))
