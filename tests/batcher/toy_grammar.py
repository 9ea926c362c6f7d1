"""A grammar that is easy to see through: 'STRIDE LEAST MOST' is LEAST to MOST tokens from 10 on, the i-th of them i
modulo STRIDE, and then an end (token 1 or 2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from batcher.grammar import GrammarError, Permit, num_mask_words

ENDS = (1, 2)


class ToyGrammars:
    """`on_advance(grammar, num_tokens)` runs first of all: a test may block in it."""

    def __init__(
        self, vocab_size: int = 100, on_advance: Callable[[str, int], None] = lambda _grammar, _count: None
    ) -> None:
        self.vocab_size = vocab_size
        self.on_advance = on_advance

    def matcher(self, grammar: str) -> ToyMatcher:
        return ToyMatcher(self, grammar)


class ToyMatcher:
    def __init__(self, grammars: ToyGrammars, grammar: str) -> None:
        self._grammars = grammars
        self._grammar = grammar
        self._count = 0

    def allowed(self) -> list[int]:
        stride, least, most = map(int, self._grammar.split())
        body = [token for token in range(10, self._grammars.vocab_size) if token % stride == self._count % stride]
        return (list(ENDS) if self._count >= least else []) + (body if self._count < most else [])

    def advance(self, tokens: Sequence[int]) -> Permit:
        self._grammars.on_advance(self._grammar, self._count)
        if not self._grammar[0].isdigit():
            raise GrammarError(f"no grammar: {self._grammar}")
        for token in tokens:
            if token not in self.allowed():
                raise GrammarError(f"token {token} is not allowed")
            self._count += 1
        if self._grammar.endswith(" 666") and self._count == 3:
            raise GrammarError("it costs too much")
        bits = np.zeros(num_mask_words(self._grammars.vocab_size) * 32, np.uint8)
        bits[self.allowed()] = 1
        mask = np.packbits(bits, bitorder="little").view(np.int32)
        return Permit(mask, is_over=set(self.allowed()) <= set(ENDS))
