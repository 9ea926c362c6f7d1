"""Masks for text: each replaces single characters by single characters, so lengths stay the same."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

STAND_INS = range(0x100000, 0x10FFFE)  # the last private-use plane
SLICE_CHARS = 32 * 1024
_STAND_IN = re.compile("[\U00100000-\U0010fffd]")

Change = Callable[[str], str]


class Mask:
    """Replaces each of `letters` by the same other character. It cannot be undone. It is fast: ASCII letters are
    replaced in the UTF-8 bytes. Masking a masked text changes nothing."""

    def __init__(self, letters: Collection[str]) -> None:
        candidates = [char for char in (*string.punctuation, "\x1a", "\x7f") if char not in letters]
        if not candidates:
            raise ValueError("the special tokens use every punctuation mark: none is left to mask with")
        ascii_letters = "".join(letter for letter in letters if letter.isascii())
        self._table = bytes.maketrans(ascii_letters.encode(), candidates[0].encode() * len(ascii_letters))
        self._others = [letter for letter in letters if not letter.isascii()]
        self._mask = candidates[0]

    def __call__(self, text: str) -> str:
        text = text.encode().translate(self._table).decode()
        for letter in self._others:
            text = text.replace(letter, self._mask)
        return text


class Substitution:
    """Replaces each of `letters` by its own stand-in. `undo` restores the letters."""

    def __init__(self, letters: Sequence[str], stand_ins: Sequence[str]) -> None:
        self._table = str.maketrans(dict(zip(letters, stand_ins, strict=True)))
        self._back = str.maketrans(dict(zip(stand_ins, letters, strict=True)))

    def __call__(self, text: str) -> str:
        return translated(text, self._table)

    def undo(self, text: str) -> str:
        """The text before it was masked."""
        return translated(text, self._back)


def translated(text: str, table: Mapping[int, str]) -> str:
    """`str.translate` in slices: a call is slow and holds the interpreter's lock until it returns."""
    return "".join([part.translate(table) for part in _slices(text)])


def _slices(text: str) -> Iterator[str]:
    return (text[start : start + SLICE_CHARS] for start in range(0, len(text), SLICE_CHARS))


def free_characters(value: Any, count: int) -> list[str]:
    """`count` consecutive characters of the last private-use plane that occur in none of the value's strings.

    Raises ValueError if there are none.
    """
    used = {ord(char) for text in strings_of(value) for part in _slices(text) for char in set(_STAND_IN.findall(part))}
    for start in range(STAND_INS.start, STAND_INS.stop - count, count):
        if used.isdisjoint(range(start, start + count)):
            return [chr(code) for code in range(start, start + count)]
    raise ValueError("The conversation uses up the last private-use plane of Unicode.")


def strings_of(value: Any) -> Iterator[str]:
    """Every string in a JSON-like value, keys too."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping):
            stack += [*item.keys(), *item.values()]
        elif isinstance(item, Sequence):
            stack += item


def map_strings(value: Any, change: Change, fields: Collection[str] = ()) -> Any:
    """A JSON-like value with `change` applied to every string, and to every key that is not in `fields`."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key if key in fields else change(key): map_strings(item, change, fields) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [map_strings(item, change, fields) for item in value]
    return value
