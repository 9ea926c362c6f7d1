"""Masks for text, and strings that a template compares unmasked and prints masked."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from server.text.template_environment import TemplateError

STAND_INS = range(0x100000, 0x10FFFE)  # the last private-use plane
SLICE_CHARS = 32 * 1024
_STAND_IN = re.compile("[\U00100000-\U0010fffd]")

Change = Callable[[str], str]


class MaskedText(str):
    """A string that is printed masked and compared unmasked, so a template takes the same branches as for the text.

    Code that joins, prints or encodes strings reads the masked text, and so does all C code. Comparisons, hashes and
    searches use the unmasked text. A piece of the text (a slice, a strip, a split) is a MaskedText as well. The names
    of its attributes begin with an underscore, so the sandbox hides them from templates.
    """

    __slots__ = ("_change", "_text")
    _change: Change
    _text: str

    def __new__(cls, text: str, change: Change) -> MaskedText:
        masked = super().__new__(cls, change(text))
        masked._change, masked._text = change, text
        return masked

    def __iter__(self) -> Iterator[str]:
        return (MaskedText(char, self._change) for char in self._text)


def _unmasked(value: Any) -> Any:
    if isinstance(value, tuple):  # of `startswith`
        return tuple(map(_unmasked, value))
    return value._text if isinstance(value, MaskedText) else value


def _on_the_text(name: str) -> Callable[..., Any]:
    """A method of `str` that works on the unmasked text. Strings in its result are masked."""
    method = getattr(str, name)

    def of_text(self: MaskedText, *args: Any, **kwargs: Any) -> Any:
        result = method(self._text, *map(_unmasked, args), **{name: _unmasked(arg) for name, arg in kwargs.items()})
        if isinstance(result, (list, tuple)):
            return type(result)(MaskedText(piece, self._change) for piece in result)
        return MaskedText(result, self._change) if isinstance(result, str) else result

    return of_text


for _name in (
    "__contains__ __eq__ __ge__ __getitem__ __gt__ __hash__ __le__ __len__ __lt__ __ne__ capitalize casefold count "
    "endswith find index isalnum isalpha isascii isdecimal isdigit isidentifier islower isnumeric isprintable isspace "
    "istitle isupper lower lstrip partition removeprefix removesuffix rfind rindex rpartition rsplit rstrip split "
    "splitlines startswith strip swapcase title upper"
).split():
    setattr(MaskedText, _name, _on_the_text(_name))


class Mask:
    """Replaces all of `letters` by one other character, which cannot be undone. ASCII letters are replaced in the UTF-8
    bytes, which is fast. Masking a masked text changes nothing."""

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
    """Calls `str.translate` on slices, because a call is slow and holds the interpreter's lock until it returns."""
    return "".join([part.translate(table) for part in _slices(text)])


def _slices(text: str) -> Iterator[str]:
    return (text[start : start + SLICE_CHARS] for start in range(0, len(text), SLICE_CHARS))


def free_characters(value: Any, count: int) -> list[str]:
    """`count` consecutive characters of the last private-use plane that occur in none of the value's strings.

    Raises TemplateError if there are none.
    """
    used = {ord(char) for text in strings_of(value) for part in _slices(text) for char in set(_STAND_IN.findall(part))}
    for start in range(STAND_INS.start, STAND_INS.stop - count, count):
        if used.isdisjoint(range(start, start + count)):
            return [chr(code) for code in range(start, start + count)]
    raise TemplateError("The conversation uses up the last private-use plane of Unicode.")


def strings_of(value: Any) -> Iterator[str]:
    """Yields every string in a JSON-like value, including keys."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping):
            stack += [*item.keys(), *item.values()]
        elif isinstance(item, Sequence):
            stack += item


def masked_strings(value: Any, change: Change) -> Any:
    """A JSON-like value with every string and every key as a MaskedText."""
    if isinstance(value, str):
        return MaskedText(value, change)
    if isinstance(value, Mapping):
        return {MaskedText(key, change): masked_strings(item, change) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [masked_strings(item, change) for item in value]
    return value
