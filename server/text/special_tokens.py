"""Splits text at special tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

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
