"""Finds the end of the first stop string in a growing text, and the part of the text that may be shown so far.

`StopStrings` is an Aho-Corasick automaton (Aho and Corasick, 1975). Each state stands for a prefix of a stop string.
After a text, the state is the longest suffix of the text that is such a prefix. The characters of the state are held
back. Averaged over a text, the work per character is bounded by a constant for any stop strings.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

NO_CHARACTER = 0x110000  # the code after the last one of Unicode: it occurs in no text


class StopStrings:
    """The automaton of some stop strings. It is immutable, so all texts with the same stop strings share one.

    The states that a string adds have consecutive numbers. A dictionary holds only the transitions at which a string
    leaves another one, at most one per string. So each character of a stop string takes 16 bytes.
    """

    __slots__ = ("_branches", "_codes", "_fallbacks", "_lengths", "depths", "initials")

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` holds at least one string and no empty string. State 0 stands for the empty text."""
        self.initials = frozenset(stop[0] for stop in stops)
        self._codes = array("I", [NO_CHARACTER])  # the character that leads from a state to the next one by number
        self._branches: dict[int, dict[int, int]] = {}  # state -> character -> state, where a string leaves another
        self._fallbacks = array("I", [0])  # the state of the longest proper suffix of a state's characters
        self._lengths = array("I", [0])  # of the longest stop string that ends in a state; 0: none does
        self.depths = array("I", [0])  # the number of characters that a state stands for
        for stop in stops:
            self._lengths[self._add(stop)] = len(stop)
        self._add_fallbacks(stops)

    def _add(self, stop: str) -> int:
        state = 0
        for char in stop:
            following = self._child(state, ord(char))
            state = self._append(state, ord(char)) if following is None else following
        return state

    def _child(self, state: int, code: int) -> int | None:
        return state + 1 if self._codes[state] == code else self._branches.get(state, {}).get(code)

    def _append(self, state: int, code: int) -> int:
        new = len(self._codes)
        if new == state + 1:
            self._codes[state] = code
        else:
            self._branches.setdefault(state, {})[code] = new
        self._codes.append(NO_CHARACTER)
        self._fallbacks.append(0)
        self._lengths.append(0)
        self.depths.append(self.depths[state] + 1)
        return new

    def _add_fallbacks(self, stops: Sequence[str]) -> None:
        """Visits the states in the order of their depths: a state's fallback depends on its parent's."""
        states = dict.fromkeys(stops, 0)
        for depth in range(max(map(len, stops))):
            for stop, parent in states.items():
                if depth >= len(stop):
                    continue
                state = self._child(parent, ord(stop[depth]))
                assert state is not None
                states[stop] = state
                if parent:
                    fallback = self._fallbacks[state] = self._step(self._fallbacks[parent], ord(stop[depth]))
                    self._lengths[state] = self._lengths[state] or self._lengths[fallback]

    def _step(self, state: int, code: int) -> int:
        while (following := self._child(state, code)) is None:
            if not state:
                return 0
            state = self._fallbacks[state]
        return following

    def read(self, state: int, text: str) -> tuple[int, int, int]:
        """Reads `text` from a state on, up to the end of the first stop string.

        Returns (the new state, the number of characters read, the length of the stop string that ends there). Length 0
        means that no stop string ends in `text` and all of it was read.
        """
        initials, codes, branches, fallbacks = self.initials, self._codes, self._branches, self._fallbacks
        lengths, count = self._lengths, 0
        for char in text:
            count += 1
            if not state and char not in initials:
                continue
            code = ord(char)
            while codes[state] != code:
                if state in branches and code in branches[state]:
                    state = branches[state][code]
                    break
                if not state:
                    break
                state = fallbacks[state]
            else:
                state += 1
            if lengths[state]:
                return state, count, lengths[state]
        return state, len(text), 0


class StopFinder:
    """Searches one growing text for stop strings. `push` returns the text that may be shown.

    Text is released as soon as it can no longer become part of a stop string. The first complete stop string ends the
    text. If several are complete at the same character, the longest one counts. So the result does not depend on how
    the text was cut into pieces.
    """

    __slots__ = ("_held", "_include", "_state", "_stops", "matched")

    def __init__(self, stops: StopStrings, *, include_in_output: bool = False) -> None:
        self._stops = stops
        self._include = include_in_output
        self._state = 0
        self._held = ""  # the characters that the state stands for
        self.matched: str | None = None  # once set, the text has ended

    def push(self, text: str) -> str:
        stops = self._stops
        if not self._state and stops.initials.isdisjoint(text):
            return text
        self._state, count, length = stops.read(self._state, text)
        buffer = self._held + text
        if length:
            end = len(self._held) + count
            self.matched, self._held = buffer[end - length : end], ""
            return buffer[: end if self._include else end - length]
        cut = len(buffer) - stops.depths[self._state]
        self._held = buffer[cut:]
        return buffer[:cut]

    def flush(self) -> str:
        """The held-back text. Call it at the end of the text."""
        held, self._held = self._held, ""
        return held
