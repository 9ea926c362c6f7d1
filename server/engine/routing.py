"""Chooses one of several engines for a request: one that has computed the prompt's beginning, unless it is busy."""

from __future__ import annotations

from collections.abc import Sequence

from server.shared_counts import PrefixTable

BLOCK_TOKENS = 64
MOST_BLOCKS = 32  # of one prompt: the work for a long one is bounded
# An engine with more open requests than the least loaded one by this many, and by this factor, gets no more of them.
MOST_AHEAD, TIMES_AHEAD = 8, 1.5


class Router:
    """Remembers which engine has last computed which beginning of a prompt. The engines forget theirs by themselves, so
    this is a guess.

    Args:
        prefixes: its memory, which several processes may share.
    """

    def __init__(self, prefixes: PrefixTable | None = None) -> None:
        self._prefixes = prefixes or PrefixTable()

    def choose(self, prompt: Sequence[int], salt: int, loads: Sequence[int]) -> int:
        """The number of an engine.

        Args:
            salt: prompts with different ones share nothing.
            loads: open requests of each engine.
        """
        digests = _digests(prompt, salt)
        least = min(range(len(loads)), key=lambda number: loads[number])
        found = map(self._prefixes.get, reversed(digests))
        known = next((engine for engine in found if engine is not None), least)
        limit = max(loads[least] + MOST_AHEAD, TIMES_AHEAD * loads[least])
        chosen = known if loads[known] <= limit else least
        for digest in digests:
            self._prefixes.put(digest, chosen)
        return chosen

    def forget(self) -> None:
        """The engines' prefix caches are empty."""
        self._prefixes.clear()


def _digests(prompt: Sequence[int], salt: int) -> list[int]:
    """Of the beginnings of the prompt, one block longer each. A last block that is not full counts for a short prompt
    only: the next turn of a chat would not find it."""
    digests: list[int] = []
    digest = hash(salt)
    end = min(len(prompt), MOST_BLOCKS * BLOCK_TOKENS)
    for start in range(0, end, BLOCK_TOKENS):
        block = tuple(prompt[start : start + BLOCK_TOKENS])
        if digests and len(block) < BLOCK_TOKENS:
            break
        digest = hash((digest, block))
        digests.append(digest)
    return digests
