"""Llama 3's calls as JSON: `{"name": "f", "parameters": {"a": 1}}`, several of them separated by `;`.

"arguments" is read like "parameters". The keys may have any order, and "type" and "id" are allowed too. An object is
not a call if it has another key, if its name is not a tool's, or if its arguments are not an object.
"""

from __future__ import annotations

import json
from collections.abc import Collection

from server.text.tool_calls.json_scanner import Expects, JsonScanner
from server.text.tool_calls.parser import MAX_DEPTH, CallParser

ARGUMENT_KEYS = ("parameters", "arguments")
OTHER_KEYS = ("type", "id")


class JsonCallParser(CallParser):
    """Reads calls as JSON. A call's `arguments` are the model's own characters, from brace to brace."""

    opening = "{"

    def __init__(self, names: Collection[str], *, most_calls: int | None = None) -> None:
        super().__init__(names, most_calls=most_calls)
        self._scanner = JsonScanner(max_depth=MAX_DEPTH)
        self._key: str | None = None  # the last one read
        self._name: str | None = None
        self._early_arguments: list[str] = []  # read before the name

    def _begin(self) -> None:
        self._scanner = JsonScanner(max_depth=MAX_DEPTH)
        self._key = self._name = None
        self._early_arguments = []
        self._read = self._read_object

    def _end_call_early(self) -> None:
        if self._read == self._read_end:
            self._held.clear()

    def _read_object(self, text: str, at: int) -> int:
        """Reads until it is certain whether the object is a call."""
        scanner, expected, depth = self._scanner, self._scanner.expects, self._scanner.depth
        end = scanner.read(text, at)
        if scanner.expects is Expects.BROKEN:
            self._fail()
            return at
        self._held.append(text[at:end])
        if max(depth, scanner.depth) >= 2:
            self._early_arguments.append(text[at:end])
        if scanner.expects is Expects.NOTHING:
            self._fail()
        elif not self._may_be_call(expected):
            self._release()
            self._read = self._read_other_object
        elif self._name is not None and self._early_arguments:
            arguments = "".join(self._early_arguments)
            self._commit(self._name)
            self._pieces.add_arguments(arguments)
            self._read = self._read_arguments if scanner.depth >= 2 else self._read_end
        return end

    def _may_be_call(self, expected: Expects) -> bool:
        """Whether the object can still be a call. `expected` is the scanner's state before its last read."""
        scanner = self._scanner
        if scanner.depth > 1:
            return self._key in ARGUMENT_KEYS and self._early_arguments[0] == "{"
        if expected is Expects.STRING and scanner.expects is Expects.COLON:
            self._key = _decoded(scanner.string)
            if self._key in ARGUMENT_KEYS:
                return not self._early_arguments
            return self._key in OTHER_KEYS or (self._key == "name" and self._name is None)
        if expected is Expects.VALUE and scanner.expects is not Expects.VALUE:
            return scanner.expects is Expects.STRING if self._key == "name" else self._key not in ARGUMENT_KEYS
        if expected is Expects.STRING and scanner.expects is Expects.COMMA_OR_END and self._key == "name":
            self._name = _decoded(scanner.string)
            return self._name in self._names
        return True

    def _read_other_object(self, text: str, at: int) -> int:
        """Reads an object that is not a call. It is content, and the objects in it are content too."""
        end = self._scanner.read(text, at)
        self._pieces.add_content(text[at:end])
        if self._scanner.expects in (Expects.BROKEN, Expects.NOTHING):
            self._read = self._read_content
        return end

    def _read_arguments(self, text: str, at: int) -> int:
        """Reads the arguments of a call that has begun, up to their closing brace."""
        start = at
        while at < len(text) and self._scanner.depth >= 2 and self._scanner.expects is not Expects.BROKEN:
            at = self._scanner.read(text, at)
        self._pieces.add_arguments(text[start:at])
        if self._scanner.expects is Expects.BROKEN:
            self._read = self._read_broken_arguments
        elif self._scanner.depth < 2:
            self._read = self._read_end
        return at

    def _read_end(self, text: str, at: int) -> int:
        """Reads the rest of the call's object after the arguments. The object's closing brace may be missing."""
        end = self._scanner.read(text, at)
        if self._scanner.expects is Expects.BROKEN:
            self._end_call_without_brace()
        elif self._scanner.expects is Expects.NOTHING:
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


def _decoded(raw: str) -> str:
    return str(json.loads(f'"{raw}"'))
