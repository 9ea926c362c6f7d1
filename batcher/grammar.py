"""The contract between the batcher and whatever knows grammars. Owned here, implemented by `server.grammar.matcher`.

A request with a grammar draws its tokens under a *mask*: a bit for each token of the vocabulary, 1 where the token may
come next. The mask of a token needs the token before it. So such a request sits out the steps between the dispatch of
its token and the mask that follows from it: at a pipeline depth of 2 it decodes in every other step, next to requests
without a grammar, which decode in all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:  # the server raises GrammarError, and has no use for numpy
    import numpy as np


class GrammarError(ValueError):
    """The grammar cannot be compiled, or costs more than any grammar may. The message is for the client."""


class Permit(NamedTuple):
    """What may come next."""

    mask: np.ndarray  # i32[num_mask_words(vocab_size)], bit i % 32 of word i // 32 is token i's
    is_over: bool  # the grammar is complete: nothing but an end may follow


class Matcher(Protocol):
    """Where one request stands in its grammar. Not thread-safe."""

    def advance(self, tokens: Sequence[int]) -> Permit:
        """Takes in the tokens drawn since the last call. The first call has none, and compiles the grammar.

        Raises GrammarError. A token that the last mask did not let through is one, too.
        """


class Grammars(Protocol):
    """Makes matchers. Thread-safe."""

    def matcher(self, grammar: str) -> Matcher: ...


def num_mask_words(vocab_size: int) -> int:
    """Words of 32 bits in a mask with one bit for each token."""
    return -(-vocab_size // 32)
