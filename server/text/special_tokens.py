"""Splits text at special tokens, and encodes text with special tokens only where the caller marks them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the processes that run templates need no tokenizer
    from server.text.tokenizer import ByteLevelTokenizer

WINDOW = 8192  # characters per search; a search holds the interpreter's lock, for a few milliseconds at most


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a text: plain text, or one special token."""

    text: str
    special: bool


class SpecialTokens:
    """Finds special tokens in texts: the leftmost one first, and the longest of several at one position."""

    def __init__(self, tokens: Iterable[str]) -> None:
        longest_first = sorted(tokens, key=len, reverse=True)
        self._search = re.compile("|".join(map(re.escape, longest_first)) or "(?!)").search
        self._longest = len(longest_first[0]) if longest_first else 0

    def split(self, text: str) -> list[Part]:
        parts: list[Part] = []
        begin = start = 0  # of the plain text, and of the text that has not been searched
        while start < len(text):
            end = start + WINDOW
            found = self._search(text, start, end + self._longest)
            if found is None or found.start() >= end:  # a token from `end` on is found in the next window
                start = end
                continue
            if found.start() > begin:
                parts.append(Part(text[begin : found.start()], False))
            parts.append(Part(found[0], True))
            begin = start = found.end()
        if begin < len(text):
            parts.append(Part(text[begin:], False))
        return parts


def encode_all(tokenizer: ByteLevelTokenizer, prompts: Sequence[Sequence[Part]]) -> list[list[int]]:
    """Each prompt's ids. Special parts become their ids. Plain parts are encoded as text, even if they hold the text of
    a special token."""
    plain = iter(tokenizer.encode_plain([part.text for parts in prompts for part in parts if not part.special]))
    encoded: list[list[int]] = []
    for parts in prompts:
        ids: list[int] = []
        for part in parts:
            if part.special:
                ids.append(tokenizer.special_tokens[part.text])
            else:
                ids += next(plain)
        encoded.append(ids)
    return encoded


def encode_parts(tokenizer: ByteLevelTokenizer, parts: Sequence[Part]) -> list[int]:
    """The ids of a text that has been split at its special tokens."""
    return encode_all(tokenizer, [parts])[0]
