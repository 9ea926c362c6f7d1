"""Checks JSON (RFC 8259) piece by piece, without building values."""

from __future__ import annotations

import enum
import re

from server.text.tool_calls.matching import end_of_run

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
NUMBER = r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?"
_SCALAR = re.compile(rf"{NUMBER}|true|false|null", re.ASCII)
_SCALAR_CHARACTERS = frozenset("0123456789+-.eEtrufalsn")
_HEX = frozenset("0123456789abcdefABCDEF")
_SPACE = frozenset(" \t\r\n")


class Expects(enum.Enum):
    """The next part of the JSON that a scanner can read, apart from white space."""

    VALUE = enum.auto()
    VALUE_OR_END = enum.auto()  # of a list that is empty so far
    KEY = enum.auto()
    KEY_OR_END = enum.auto()  # of an object that is empty so far
    COLON = enum.auto()
    COMMA_OR_END = enum.auto()
    STRING = enum.auto()  # more of a string
    ESCAPE = enum.auto()
    HEX = enum.auto()
    SCALAR = enum.auto()  # more of a number or a word
    NOTHING = enum.auto()  # the value is complete
    BROKEN = enum.auto()


class JsonScanner:
    """Scans one object. `string` is the raw text of the last string read at depth 1, a key or a value."""

    __slots__ = ("_hex_left", "_is_key", "_max_depth", "_scalar", "_stack", "_string", "expects")

    def __init__(self, *, max_depth: int) -> None:
        """The object's opening brace has been read."""
        self._max_depth = max_depth
        self._stack = ["{"]
        self._is_key = False
        self._hex_left = 0
        self._scalar: list[str] = []
        self._string: list[str] = []
        self.expects = Expects.KEY_OR_END

    @property
    def depth(self) -> int:
        """How many objects and lists are open."""
        return len(self._stack)

    @property
    def string(self) -> str:
        """The raw text of the last string that was read at depth 1."""
        return "".join(self._string)

    def read(self, text: str, at: int) -> int:
        """Reads one character, or a run of plain characters in a string. Returns the index after them.

        If the character is not valid JSON here, it is not read and `expects` becomes BROKEN.
        """
        expects = self.expects
        if expects is Expects.STRING:
            end = end_of_run(_PLAIN, text, at)
            if end > at:
                self._keep(text[at:end])
                return end
        if expects is Expects.SCALAR and text[at] not in _SCALAR_CHARACTERS:
            self._end_scalar()
        if self.expects is not Expects.BROKEN and not self._read_character(text[at]):
            self.expects = Expects.BROKEN
        return at if self.expects is Expects.BROKEN else at + 1

    def skip_value(self) -> None:
        """Goes on after a value that the caller has read. `expects` is VALUE."""
        self.expects = Expects.COMMA_OR_END

    def _read_character(self, char: str) -> bool:
        match self.expects:
            case Expects.STRING:
                return self._read_in_string(char)
            case Expects.ESCAPE:
                return self._read_escape(char)
            case Expects.HEX:
                return self._read_hex(char)
            case Expects.SCALAR:
                self._scalar.append(char)
                return True
            case Expects.NOTHING:
                return False
        return char in _SPACE or self._read_structure(char)

    def _read_structure(self, char: str) -> bool:
        match self.expects, char:
            case (Expects.VALUE | Expects.VALUE_OR_END, '"') | (Expects.KEY | Expects.KEY_OR_END, '"'):
                self._is_key = self.expects in (Expects.KEY, Expects.KEY_OR_END)
                self._string.clear()
                self.expects = Expects.STRING
            case (Expects.VALUE | Expects.VALUE_OR_END, "{" | "[") if self.depth < self._max_depth:
                self._stack.append(char)
                self.expects = Expects.KEY_OR_END if char == "{" else Expects.VALUE_OR_END
            case (Expects.VALUE | Expects.VALUE_OR_END, _) if char in _SCALAR_CHARACTERS:
                self._scalar = [char]
                self.expects = Expects.SCALAR
            case Expects.COLON, ":":
                self.expects = Expects.VALUE
            case Expects.COMMA_OR_END, ",":
                self.expects = Expects.KEY if self._stack[-1] == "{" else Expects.VALUE
            case (Expects.KEY_OR_END | Expects.COMMA_OR_END, "}") if self._stack[-1] == "{":
                self._end_container()
            case (Expects.VALUE_OR_END | Expects.COMMA_OR_END, "]") if self._stack[-1] == "[":
                self._end_container()
            case _:
                return False
        return True

    def _end_container(self) -> None:
        self._stack.pop()
        self.expects = Expects.COMMA_OR_END if self._stack else Expects.NOTHING

    def _end_scalar(self) -> None:
        complete = _SCALAR.fullmatch("".join(self._scalar))
        self.expects = Expects.COMMA_OR_END if complete else Expects.BROKEN

    def _read_in_string(self, char: str) -> bool:
        if char == '"':
            self.expects = Expects.COLON if self._is_key else Expects.COMMA_OR_END
            return True
        if char == "\\":
            self._keep(char)
            self.expects = Expects.ESCAPE
            return True
        return False  # a control character

    def _read_escape(self, char: str) -> bool:
        self._keep(char)
        self._hex_left = 4
        self.expects = Expects.HEX if char == "u" else Expects.STRING
        return char in '"\\/bfnrtu'

    def _read_hex(self, char: str) -> bool:
        self._keep(char)
        self._hex_left -= 1
        if not self._hex_left:
            self.expects = Expects.STRING
        return char in _HEX

    def _keep(self, text: str) -> None:
        if self.depth == 1:
            self._string.append(text)
