"""Matchers over the model's tokens. A matcher has the state of a request in its grammar, and computes masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from batcher.grammar import GrammarError, Permit, num_mask_words
from server.grammar.compiler import Vocabulary, compile_grammar, error_of
from server.grammar.forms import ThinkingBudget

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from server.text.tokenizer import ByteLevelTokenizer

CACHE_SIZE = 64  # compiled grammars
MAX_NUMBER_CHARS = 40  # of a JSON number, because `{"type": "integer"}` allows any number of digits
_NUMBER_BYTES = frozenset(b"0123456789.eE+-")


def vocabulary_of(tokenizer: ByteLevelTokenizer, *, vocab_size: int, end_ids: Sequence[int]) -> Vocabulary:
    """The model's tokens without the special ones, of which a grammar allows only the end tokens."""
    tokens = [b"" if id in tokenizer.special_ids else text for id, text in enumerate(tokenizer.token_bytes)]
    tokens = [*tokens[:vocab_size], *[b""] * (vocab_size - len(tokens))]
    return Vocabulary(tokens, end_ids=end_ids, encode=lambda text: tokenizer.encode_plain([text])[0])


class TokenGrammars:
    """A `batcher.grammar.Grammars`. The first matcher loads the vocabulary, unless `load` was called before."""

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        self._load = vocabulary
        self._vocabulary: Vocabulary | None = None
        self._loading = Lock()
        self.compiled = lru_cache(CACHE_SIZE)(self._compile)  # each at its start; never advanced

    def load(self) -> Vocabulary:
        """Loads the vocabulary, which takes a second for a hundred thousand tokens."""
        with self._loading:
            if self._vocabulary is None:
                self._vocabulary = self._load()
            return self._vocabulary

    @cached_property
    def number_bound(self) -> NumberBound:
        return NumberBound(self.load().token_bytes)

    def matcher(self, grammar: str) -> TokenMatcher:
        return TokenMatcher(self, grammar)

    def _compile(self, grammar: str) -> LLMatcher:
        return compile_grammar(grammar, self.load())


class NumberBound:
    """Ends JSON numbers: after `MAX_NUMBER_CHARS` characters no token continues one, if anything else may follow."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes
        continues = np.zeros(32 * num_mask_words(len(token_bytes)), bool)
        continues[: len(token_bytes)] = [token[:1] != b"" and token[0] in _NUMBER_BYTES for token in token_bytes]
        self._others = ~np.packbits(continues, bitorder="little").view(np.int32)
        self._quote = token_bytes.index(b'"') if b'"' in token_bytes else None

    def length_after(self, length: int, token: int) -> int:
        """The number of characters at the end of the text that a number may have; before the token it was `length`."""
        text = self._token_bytes[token]
        own = next((i for i, byte in enumerate(reversed(text)) if byte not in _NUMBER_BYTES), len(text))
        return length + own if own == len(text) else own

    def apply(self, mask: np.ndarray) -> None:
        """Removes the tokens that continue a number. Removes none in a string, where a quotation mark may follow."""
        if self._quote is not None and not mask[self._quote // 32] >> (self._quote % 32) & 1:
            bounded = mask & self._others
            if bounded.any():
                mask[:] = bounded


class Thinking:
    """Counts the tokens of the reasoning, and closes it when its budget is spent."""

    def __init__(self, budget: ThinkingBudget, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._left = budget.num_tokens
        self._mark = (budget.start or budget.end).encode()  # what is looked for
        self._end = budget.end.encode()
        self._counts = not budget.start
        self._text = b""  # the last bytes, in which the mark may begin
        self._closing: list[int] = []  # the tokens that must still come
        self.is_over = False

    def take(self, token: int) -> None:
        """Adds a token that was drawn."""
        if self._closing:
            self._closing.pop(0)
        elif self._counts:
            self._left -= 1
        self._text += self._vocabulary.token_bytes[token]
        if self._mark in self._text:
            self._text = self._text.partition(self._mark)[2]
            self.is_over = self._counts
            self._counts, self._mark = True, self._end
        self._text = self._text[-len(self._end) - len(self._mark) :]

    def apply(self, mask: np.ndarray) -> None:
        """Leaves only the next token of the end in the mask, if the budget is spent."""
        if not self._counts or (self._left > 0 and not self._closing):
            return
        if not self._closing:
            tokens, end = self._vocabulary.token_bytes, self._end
            self._closing = [tokens.index(end)] if end in tokens else [*self._vocabulary.encode(end.decode())]
        mask[:] = 0
        mask.view(np.uint32)[self._closing[0] // 32] = 1 << self._closing[0] % 32


class TokenMatcher:
    """The `batcher.grammar.Matcher` of one request."""

    def __init__(self, grammars: TokenGrammars, grammar: str) -> None:
        self._grammars = grammars
        self._budget, self._grammar = ThinkingBudget.split(grammar)
        self._thinking: Thinking | None = None
        self._matcher: LLMatcher | None = None
        self._has_json = "json_schema" in grammar or "%json" in grammar
        self._number_chars = 0

    def advance(self, tokens: Sequence[int]) -> Permit:
        if self._matcher is None:
            self._matcher = self._grammars.compiled(self._grammar).deep_copy()
            self._thinking = None if self._budget is None else Thinking(self._budget, self._grammars.load())
        matcher, vocabulary = self._matcher, self._grammars.load()
        for token in tokens:
            if not matcher.consume_token(token):
                raise GrammarError(_reason(matcher))
            if self._thinking is not None:
                self._thinking.take(token)
                self._thinking = None if self._thinking.is_over else self._thinking
            if self._has_json:
                self._number_chars = self._grammars.number_bound.length_after(self._number_chars, token)
        mask = np.zeros(num_mask_words(vocabulary.size), np.int32)
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error():
            raise GrammarError(_reason(matcher))
        if self._has_json and self._number_chars >= MAX_NUMBER_CHARS:
            self._grammars.number_bound.apply(mask)
        if self._thinking is not None:
            self._thinking.apply(mask)
        return Permit(mask, matcher.is_stopped())


def _reason(matcher: LLMatcher) -> str:
    """The reason why a matcher cannot continue. llguidance's own message about a limit only names its parser."""
    error = error_of(matcher)
    if "satisfy the grammar" in error:
        return f"a token that the grammar does not allow was drawn: {error}"
    if "NoExtensionBias" in error:
        return "the grammar is too costly, or it contradicts itself: it allows no token here; make it simpler"
    return f"the grammar is too costly; make it simpler, for example with fewer optional properties: {error}"
