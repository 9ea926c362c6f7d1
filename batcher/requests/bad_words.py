"""Words that a request must not write. A word is a list of tokens; its last token is barred after the tokens before it.

A word of one token is always barred, by a mask that is sent once, like the mask of `allowed_token_ids`. The masks of
longer words depend on the drawn tokens, like a grammar's. They can be combined with a grammar.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from batcher.grammar import Matcher, Permit

Words = Sequence[Sequence[int]]


class BadWords:
    """A `Matcher` that bars the tokens that would complete a word. It may wrap another matcher, such as a grammar's.

    Words begin anywhere in the output, never in the prompt.
    """

    def __init__(self, words: Words, everything: np.ndarray, matcher: Matcher | None) -> None:
        self._matcher = matcher
        self._free = Permit(everything, is_over=False)
        self._ends: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)  # all but a word's last token -> that
        for word in words:
            self._ends[tuple(word[:-1])].append(word[-1])
        self._lengths = sorted({len(beginning) for beginning in self._ends})
        self._recent: tuple[int, ...] = ()  # the last tokens of the output, as many as the longest beginning has

    def advance(self, tokens: Sequence[int]) -> Permit:
        permit = self._free if self._matcher is None else self._matcher.advance(tokens)
        recent = (*self._recent, *tokens)
        self._recent = recent[max(0, len(recent) - self._lengths[-1]) :]
        barred: list[int] = []
        for length in self._lengths:
            if length <= len(self._recent):
                barred += self._ends.get(self._recent[len(self._recent) - length :], ())
        return permit._replace(mask=without(permit.mask, barred)) if barred else permit


def without(mask: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
    """A mask, i32[num_mask_words], with the tokens' bits cleared."""
    bits = mask.view(np.uint32).copy()
    for token in tokens:
        bits[token // 32] &= ~np.uint32(1 << token % 32)
    return bits.view(np.int32)
