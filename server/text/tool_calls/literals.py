"""Converts literals to JSON piece by piece: JSON, Python's literals, and the mixtures of both that models write.

Strings are in '...' or "...". Control characters in them, such as a line feed, are escaped. Numbers are decimal.
`True`, `False` and `None` may stand for `true`, `false` and `null`, and a comma may follow the last item. A key that is
a number or one of these words becomes a string, as in Python's `json.dumps`, with which vLLM writes arguments. JSON is
kept as it was written, with its spaces and escapes.
"""

from __future__ import annotations

import enum
import json
import math
import re

_PLAIN = {quote: re.compile(rf"[^{quote}\\]*") for quote in "'\""}
_STRICT_PLAIN = {'"': re.compile(r'[^"\\\x00-\x1f]*')}
_SCALAR = re.compile(r"[A-Za-z0-9_.+-]+")
_STRICT_SCALAR = re.compile(r"[0-9+.eEtrufalsn-]+")
_NUMBER = re.compile(r"[+-]?(?:\d+(?P<point>\.\d*)?|(?P<bare>\.\d+))(?P<exponent>[eE][+-]?\d+)?", re.ASCII)
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_JSON_WORDS = ("true", "false", "null")
_JSON_ESCAPES = '"\\/bfnrtu'
_MAX_DIGITS = 400  # enough for a float; Python reads long integers in quadratic time
_WORDS = {"True": "true", "False": "false", "None": "null"}
_ESCAPES = {"\n": "", "\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r"}
_ESCAPES |= {"t": "\t", "v": "\v", "0": "\0"}
_NUM_HEX = {"x": 2, "u": 4, "U": 8}
_HEX = frozenset("0123456789abcdefABCDEF")
_CLOSING = {"[": "]", "{": "}"}
_SPACE = frozenset(" \t\r\n")


class Expects(enum.Enum):
    """The next part of a literal, apart from white space."""

    VALUE = enum.auto()
    VALUE_OR_END = enum.auto()  # in a list
    KEY_OR_END = enum.auto()
    COLON = enum.auto()
    COMMA_OR_END = enum.auto()
    STRING = enum.auto()
    ESCAPE = enum.auto()
    SCALAR = enum.auto()


class LiteralReader:
    """Converts one literal. `done`: the literal is complete, and the next character is not a part of it. `broken`: the
    next character is not allowed there.

    Args:
        keeps_json: the literal is in JSON's form: its spaces are kept, and so are JSON's escapes where they differ from
            Python's (`\\/`).
        is_strict: only JSON (RFC 8259) is allowed.
        opened: `{` if the brace that opens an object has been read.
    """

    __slots__ = (
        *("_comma", "_is_key", "_is_strict", "_keeps_json", "_max_depth", "_pending", "_plain", "_quote", "_scalar"),
        *("_stack", "broken", "done", "expects"),
    )

    def __init__(self, *, max_depth: int, keeps_json: bool = False, is_strict: bool = False, opened: str = "") -> None:
        self._max_depth = max_depth
        self._keeps_json = keeps_json
        self._is_strict = is_strict
        self._plain, self._scalar = (_STRICT_PLAIN, _STRICT_SCALAR) if is_strict else (_PLAIN, _SCALAR)
        self._stack = list(opened)
        self._comma: list[str] = []  # a comma and the spaces after it: they are dropped if no item follows
        self.expects = Expects.KEY_OR_END if opened else Expects.VALUE
        self._is_key = False
        self._quote = ""
        self._pending = ""  # a number, a word or an escape that has begun
        self.done = False
        self.broken = False

    def read(self, text: str, at: int) -> tuple[int, str]:
        """Reads one character, or a run of them in a string or a number. Returns (the index after them, their JSON)."""
        expects = self.expects
        match expects:
            case Expects.STRING:
                return self._read_string(text, at)
            case Expects.ESCAPE:
                return self._read_escape(text, at)
            case Expects.SCALAR:
                return self._read_scalar(text, at)
            case _ if text[at] in _SPACE:
                return at + 1, self._space(text[at])
        json_text = self._read_structure(text[at])
        if json_text is None:
            self.broken = True
            return at, ""
        return at + (self.expects is not Expects.SCALAR), json_text

    def read_on(self, text: str, at: int) -> tuple[int, str]:
        """Reads up to the end of the literal or of the text."""
        parts = []
        while at < len(text) and not (self.done or self.broken):
            at, part = self.read(text, at)
            parts.append(part)
        return at, "".join(parts)

    @property
    def depth(self) -> int:
        """The number of open lists and objects."""
        return len(self._stack)

    def skip_value(self) -> None:
        """Continues after a value that the caller has read."""
        self.expects = Expects.COMMA_OR_END

    def begin_rest(self) -> str:
        """Begins a string for text that is not allowed here. If a string has begun, the text goes on in it. The text
        becomes a value, or a key if no value is allowed. Returns the JSON before that text, including the JSON of
        characters that have been read and not converted."""
        match self.expects:
            case Expects.STRING | Expects.ESCAPE:
                before = ""
            case Expects.SCALAR:
                before = '"'
            case Expects.COLON:
                before, self._is_key = ': "', False
            case _:
                if self.expects is Expects.COMMA_OR_END:
                    self._comma = [", "]
                self._is_key = bool(self._stack) and self._stack[-1] == "{" and self.expects is not Expects.VALUE
                before = self._taken_comma() + '"'
        return before + escaped(self._pending)

    def end_rest(self) -> str:
        """Ends the string of `begin_rest`, and all that is open around it."""
        closing = "".join(_CLOSING[each] for each in reversed(self._stack))
        return '"' + (": null" if self._is_key else "") + closing

    def _space(self, char: str) -> str:
        if not self._keeps_json:
            return ""
        if self._comma:
            self._comma.append(char)
            return ""
        return char

    def _read_structure(self, char: str) -> str | None:
        """The JSON for a character outside strings and scalars; None if the character is not allowed there."""
        takes_value = self.expects in (Expects.VALUE, Expects.VALUE_OR_END)
        takes_key = self.expects is Expects.KEY_OR_END
        takes_end = takes_key or self.expects in (Expects.VALUE_OR_END, Expects.COMMA_OR_END)
        if self._is_strict and self._comma:
            takes_end = False
        if char in self._plain and (takes_value or takes_key):
            self._is_key = takes_key
            self._quote = char
            self.expects = Expects.STRING
            return self._taken_comma() + '"'
        if char in _CLOSING and takes_value and len(self._stack) < self._max_depth:
            self._stack.append(char)
            self.expects = Expects.KEY_OR_END if char == "{" else Expects.VALUE_OR_END
            return self._taken_comma() + char
        if (takes_value or (takes_key and not self._is_strict)) and self._scalar.match(char):
            self._is_key = takes_key
            self.expects = Expects.SCALAR
            return self._taken_comma()
        if takes_end and self._stack and char == _CLOSING[self._stack[-1]]:
            self._stack.pop()
            self._end_value()
            return self._spaces_after_comma() + char
        if self.expects is Expects.COMMA_OR_END and char == ",":
            self._comma = ["," if self._keeps_json else ", "]
            self.expects = Expects.KEY_OR_END if self._stack[-1] == "{" else Expects.VALUE_OR_END
            return ""
        if self.expects is Expects.COLON and char == ":":
            self.expects = Expects.VALUE
            return ":" if self._keeps_json else ": "
        return None

    def _taken_comma(self) -> str:
        """The comma before an item. It is written when the item begins: JSON allows none after the last item."""
        comma = "".join(self._comma)
        self._comma.clear()
        return comma

    def _spaces_after_comma(self) -> str:
        """The spaces after a comma that follows the last item. The comma itself is dropped."""
        spaces = "".join(self._comma[1:])
        self._comma.clear()
        return spaces

    def _end_value(self) -> None:
        self.expects = Expects.COMMA_OR_END
        self.done = not self._stack

    def _end_key_or_value(self) -> None:
        if self._is_key:
            self.expects = Expects.COLON
        else:
            self._end_value()

    def _read_string(self, text: str, at: int) -> tuple[int, str]:
        end = end_of_run(self._plain[self._quote], text, at)
        if end > at:
            return end, escaped(text[at:end])
        if text[at] == self._quote:
            self._end_key_or_value()
            return at + 1, '"'
        if text[at] != "\\":
            self.broken = True  # a control character
            return at, ""
        self._pending = "\\"
        self.expects = Expects.ESCAPE
        return at + 1, ""

    def _read_escape(self, text: str, at: int) -> tuple[int, str]:
        char = text[at]
        num_hex = len(self._pending) - 2
        if char not in _HEX if num_hex >= 0 else self._is_strict and char not in _JSON_ESCAPES:
            self.broken = True
            return at, ""
        pending = self._pending + char
        kind = pending[1]
        if kind in _NUM_HEX and num_hex + 1 < _NUM_HEX[kind]:
            self._pending = pending
            return at + 1, ""
        json_text = self._escape_json(pending)
        if json_text is None:
            self.broken = True
            return at, ""
        self._pending = ""
        self.expects = Expects.STRING
        return at + 1, json_text

    def _escape_json(self, escape: str) -> str | None:
        """A whole escape as JSON has it; None if it stands for no character."""
        kind = escape[1]
        if self._keeps_json and kind in _JSON_ESCAPES:
            return escape
        if kind not in _NUM_HEX:
            decoded = _ESCAPES.get(kind, escape)
        elif (code := int(escape[2:], 16)) <= 0x10FFFF:
            decoded = chr(code)
        else:
            return None
        return json.dumps(decoded)[1:-1]  # ASCII: half of a surrogate pair stays an escape

    def _read_scalar(self, text: str, at: int) -> tuple[int, str]:
        found = self._scalar.match(text, at)
        if found:
            if not self._is_strict and len(self._pending) + len(found[0]) > _MAX_DIGITS:
                self.broken = True
                return at, ""
            self._pending += found[0]
            return found.end(), ""
        json_text = _scalar_json(self._pending, is_strict=self._is_strict)
        if json_text is None:
            self.broken = True
            return at, ""
        self._pending = ""
        is_key = self._is_key
        self._end_key_or_value()
        return at, f'"{json_text}"' if is_key else json_text


def as_json(text: str, *, max_depth: int) -> str | None:
    """The JSON of a whole text that is one literal, in JSON's form, with white space around it. None if it is none."""
    text = text.strip()
    reader = LiteralReader(max_depth=max_depth, keeps_json=True)
    end, json_text = reader.read_on(text, 0)
    return json_text if reader.done and end == len(text) else None


def escaped(text: str) -> str:
    """The text as it is written within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def end_of_run(pattern: re.Pattern[str], text: str, at: int) -> int:
    """The index after the match of `pattern` at `at`; `at` itself if there is no match."""
    found = pattern.match(text, at)
    return found.end() if found else at


def _scalar_json(text: str, *, is_strict: bool) -> str | None:
    if text in _JSON_WORDS or _JSON_NUMBER.fullmatch(text):
        return text
    if is_strict:
        return None
    if text in _WORDS:
        return _WORDS[text]
    number = _NUMBER.fullmatch(text)
    if number is None:
        return None
    if not any(number.group("point", "bare", "exponent")):
        return str(int(text))
    value = float(text)
    return json.dumps(value) if math.isfinite(value) else None
