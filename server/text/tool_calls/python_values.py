"""Converts Python literals to JSON piece by piece: strings in '...' or "...", decimal numbers, True, False and None
(also in JSON's spelling), lists, and dicts with strings as keys."""

from __future__ import annotations

import enum
import json
import math
import re

from server.text.tool_calls.json_scanner import NUMBER
from server.text.tool_calls.matching import end_of_run

_PLAIN = {quote: re.compile(rf"[^{quote}\\\n]*") for quote in "'\""}
_SCALAR = re.compile(r"[A-Za-z0-9_.+-]+")
_NUMBER = re.compile(r"[+-]?(?:\d+(?P<point>\.\d*)?|(?P<bare>\.\d+))(?P<exponent>[eE][+-]?\d+)?", re.ASCII)
_JSON_NUMBER = re.compile(NUMBER, re.ASCII)
_MAX_DIGITS = 400  # enough for a float; Python reads long integers in quadratic time
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {"\n": "", "\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r"}
_ESCAPES |= {"t": "\t", "v": "\v", "0": "\0"}
_NUM_HEX = {"x": 2, "u": 4, "U": 8}
_HEX = frozenset("0123456789abcdefABCDEF")
_CLOSING = {"[": "]", "{": "}"}
_SPACE = frozenset(" \t\r\n")


class _Expects(enum.Enum):
    VALUE = enum.auto()
    VALUE_OR_END = enum.auto()  # in a list
    KEY_OR_END = enum.auto()
    COLON = enum.auto()
    COMMA_OR_END = enum.auto()
    STRING = enum.auto()
    ESCAPE = enum.auto()
    SCALAR = enum.auto()


class PythonValue:
    """Converts one literal. `done`: the literal is complete, and the next character is not a part of it. `broken`: the
    next character is not allowed there."""

    __slots__ = ("_expects", "_is_empty", "_is_key", "_max_depth", "_pending", "_quote", "_stack", "broken", "done")

    def __init__(self, *, max_depth: int) -> None:
        self._max_depth = max_depth
        self._stack: list[str] = []
        self._is_empty: list[bool] = []  # for each container of the stack: no item so far
        self._expects = _Expects.VALUE
        self._is_key = False
        self._quote = ""
        self._pending = ""  # a number, a word or an escape that has begun
        self.done = False
        self.broken = False

    def read(self, text: str, at: int) -> tuple[int, str]:
        """Reads one character, or a run of them in a string or a number. Returns (the index after them, their JSON)."""
        expects = self._expects
        match expects:
            case _Expects.STRING:
                return self._read_string(text, at)
            case _Expects.ESCAPE:
                return self._read_escape(text, at)
            case _Expects.SCALAR:
                return self._read_scalar(text, at)
            case _ if text[at] in _SPACE:
                return at + 1, ""
        json_text = self._read_structure(text[at])
        if json_text is None:
            self.broken = True
            return at, ""
        return at + (self._expects is not _Expects.SCALAR), json_text

    def rest(self) -> str:
        """The text that has been read but not returned, for a text that ends within the literal."""
        return self._pending

    def _read_structure(self, char: str) -> str | None:
        """The JSON for a character outside strings and scalars; None if the character is not allowed there."""
        takes_value = self._expects in (_Expects.VALUE, _Expects.VALUE_OR_END)
        takes_end = self._expects in (_Expects.VALUE_OR_END, _Expects.KEY_OR_END, _Expects.COMMA_OR_END)
        if char in _PLAIN and (takes_value or self._expects is _Expects.KEY_OR_END):
            before = self._comma()
            self._is_key = not takes_value
            self._quote = char
            self._expects = _Expects.STRING
            return before + '"'
        if char in _CLOSING and takes_value and len(self._stack) < self._max_depth:
            before = self._comma()
            self._stack.append(char)
            self._is_empty.append(True)
            self._expects = _Expects.KEY_OR_END if char == "{" else _Expects.VALUE_OR_END
            return before + char
        if takes_value and _SCALAR.match(char):
            before = self._comma()
            self._expects = _Expects.SCALAR
            return before
        if takes_end and self._stack and char == _CLOSING[self._stack[-1]]:
            self._stack.pop()
            self._is_empty.pop()
            self._end_value()
            return char
        if self._expects is _Expects.COMMA_OR_END and char == ",":
            self._expects = _Expects.KEY_OR_END if self._stack[-1] == "{" else _Expects.VALUE_OR_END
            return ""
        if self._expects is _Expects.COLON and char == ":":
            self._expects = _Expects.VALUE
            return ": "
        return None

    def _comma(self) -> str:
        """The JSON comma before an item or a key. Commas are written before items, not after them: Python allows a
        comma after the last item, JSON does not."""
        if not self._stack or self._expects is _Expects.VALUE:
            return ""
        is_first, self._is_empty[-1] = self._is_empty[-1], False
        return "" if is_first else ", "

    def _end_value(self) -> None:
        self._expects = _Expects.COMMA_OR_END
        self.done = not self._stack

    def _read_string(self, text: str, at: int) -> tuple[int, str]:
        end = end_of_run(_PLAIN[self._quote], text, at)
        if end > at:
            return end, _escaped(text[at:end])
        if text[at] == self._quote:
            if self._is_key:
                self._expects = _Expects.COLON
            else:
                self._end_value()
            return at + 1, '"'
        if text[at] == "\n":
            self.broken = True
            return at, ""
        self._pending = "\\"
        self._expects = _Expects.ESCAPE
        return at + 1, ""

    def _read_escape(self, text: str, at: int) -> tuple[int, str]:
        char = text[at]
        num_hex = len(self._pending) - 2
        if num_hex >= 0 and char not in _HEX:
            return self._break(at)
        self._pending += char
        kind = self._pending[1]
        if kind in _NUM_HEX:
            if num_hex + 1 < _NUM_HEX[kind]:
                return at + 1, ""
            code = int(self._pending[2:], 16)
            if code > 0x10FFFF:
                return self._break(at + 1)
            decoded = chr(code)
        else:
            decoded = _ESCAPES.get(char, "\\" + char)
        self._pending = ""
        self._expects = _Expects.STRING
        return at + 1, json.dumps(decoded)[1:-1]  # ASCII: half of a surrogate pair stays an escape

    def _read_scalar(self, text: str, at: int) -> tuple[int, str]:
        found = _SCALAR.match(text, at)
        if found:
            self._pending += found[0]
            if len(self._pending) > _MAX_DIGITS:
                return self._break(found.end())
            return found.end(), ""
        json_text = _scalar_json(self._pending)
        if json_text is None:
            return self._break(at)
        self._pending = ""
        self._end_value()
        return at, json_text

    def _break(self, at: int) -> tuple[int, str]:
        pending, self._pending = self._pending, ""
        self.broken = True
        return at, pending


def _escaped(text: str) -> str:
    """The text as it is written within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _scalar_json(text: str) -> str | None:
    if text in _WORDS:
        return _WORDS[text]
    if _JSON_NUMBER.fullmatch(text):
        return text
    number = _NUMBER.fullmatch(text)
    if number is None:
        return None
    if not any(number.group("point", "bare", "exponent")):
        return str(int(text))
    value = float(text)
    return json.dumps(value) if math.isfinite(value) else None
