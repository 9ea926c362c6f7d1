"""The batcher's interface to grammars. `server.grammar.matcher` implements it.

A request with a grammar draws its tokens under a *mask*: one bit for each token of the vocabulary, 1 if the token may
come next. The mask of a token depends on the previous token. So the request skips the steps between the dispatch of a
token and the next mask: at a pipeline depth of 2 it decodes in every other step. Requests without a grammar decode in
every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:  # the HTTP process imports GrammarError, without numpy
    import numpy as np


class GrammarError(ValueError):
    """The grammar cannot be compiled, or exceeds the cost limits. The message is for the client."""


class Permit(NamedTuple):
    """The tokens that may come next."""

    mask: np.ndarray  # i32[num_mask_words(vocab_size)], token i is bit i % 32 of word i // 32
    is_over: bool  # the grammar is complete: only an end may follow


class Matcher(Protocol):
    """One request's state in its grammar. Not thread-safe."""

    def advance(self, tokens: Sequence[int]) -> Permit:
        """Takes in the tokens drawn since the last call. The first call has none, and compiles the grammar.

        Raises GrammarError, also for a token that the last mask did not allow.
        """


class Grammars(Protocol):
    """Makes matchers. Thread-safe."""

    def matcher(self, grammar: str) -> Matcher: ...


def num_mask_words(vocab_size: int) -> int:
    """Words of 32 bits in a mask with one bit for each token."""
    return -(-vocab_size // 32)
