"""Finds the end of the first stop string in a growing text, and the part of the text that may be shown so far.

Each stop string is searched for as Knuth, Morris and Pratt (1977) do: after a text, the state of a search is the number
of characters of the string with which the text ends. Averaged over a text, the work per character and string is bounded
by a constant. The characters of the longest state are held back.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence


class StopStrings:
    """Some stop strings, none of which is empty. It is immutable, so all texts with the same stop strings share one."""

    __slots__ = ("initials", "searched")

    def __init__(self, stops: Sequence[str]) -> None:
        self.initials = frozenset(stop[0] for stop in stops)
        self.searched = [(stop, _borders(stop)) for stop in stops]


def _borders(stop: str) -> array[int]:
    """The length, for each beginning of the string, of the longest shorter beginning with which it ends."""
    borders, length = array("I", [0]), 0
    for char in stop[1:]:
        length = _next_length(stop, borders, length, char)
        borders.append(length)
    return borders


def _next_length(stop: str, borders: array[int], length: int, char: str) -> int:
    """The state of a search after a character; before it, the state was `length`."""
    while length and stop[length] != char:
        length = borders[length - 1]
    return length + (stop[length] == char)


class StopFinder:
    """Searches one growing text for stop strings. `push` returns the text that may be shown.

    Text is released as soon as it can no longer become part of a stop string. The first complete stop string ends the
    text. If several are complete at the same character, the longest one counts. So the result does not depend on how
    the text was cut into pieces.
    """

    __slots__ = ("_held", "_include", "_lengths", "_stops", "matched")

    def __init__(self, stops: StopStrings, *, include_in_output: bool = False) -> None:
        self._stops = stops
        self._include = include_in_output
        self._lengths = [0] * len(stops.searched)  # the states of the searches
        self._held = ""  # the characters of the longest state
        self.matched: str | None = None  # once set, the text has ended

    def push(self, text: str) -> str:
        if not self._held and self._stops.initials.isdisjoint(text):
            return text
        buffer, lengths = self._held + text, self._lengths
        for end, char in enumerate(text, len(self._held) + 1):
            ended = ""
            for i, (stop, borders) in enumerate(self._stops.searched):
                lengths[i] = _next_length(stop, borders, lengths[i], char)
                if lengths[i] == len(stop) > len(ended):
                    ended = stop
            if ended:
                self.matched, self._held = ended, ""
                return buffer[: end if self._include else end - len(ended)]
        cut = len(buffer) - max(lengths)
        self._held = buffer[cut:]
        return buffer[:cut]

    def flush(self) -> str:
        """The held-back text. Call it at the end of the text."""
        held, self._held = self._held, ""
        return held
