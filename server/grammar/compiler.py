"""Compiles grammars to llguidance's matchers, within limits, so a costly grammar fails only its own request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from batcher.grammar import GrammarError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# llguidance's limits of one token's work: some forty milliseconds, on the threads for slow masks. Each optional
# property that may come next is four items of a row, and tokens that span several of JSON's marks have many rows: with
# Llama 3's vocabulary an object may have about five hundred optional properties, and any number of required ones.
STEP_LIMITS = {"max_items_in_row": 4_000, "step_max_items": 200_000, "step_lexer_fuel": 200_000}
COMPILE_LIMITS = {"initial_lexer_fuel": 500_000, "max_lexer_states": 50_000, "max_grammar_size": 200_000}
MAX_MESSAGE_CHARS = 500


class Vocabulary:
    """A tokenizer in llguidance's form.

    Args:
        token_bytes: the bytes of each token by id; b"": no grammar allows it, such as special tokens and unused ids.
        end_ids: the tokens that may follow a complete text.
        encode: returns a text's ids, so that bytes that a grammar forces become the tokens that the model has learnt.
    """

    def __init__(
        self, token_bytes: Sequence[bytes], *, end_ids: Sequence[int], encode: Callable[[str], list[int]]
    ) -> None:
        from llguidance import LLTokenizer, TokenizerWrapper

        self.size = len(token_bytes)
        self.token_bytes = token_bytes
        self.encode = encode
        self.end_ids = tuple(end_ids)
        wrapper = TokenizerWrapper(_Wrapped(token_bytes, end_ids[0], encode))
        self.tokenizer: LLTokenizer = LLTokenizer(wrapper, n_vocab=self.size, eos_token=list(end_ids))

    @staticmethod
    @cache
    def of_bytes() -> Vocabulary:
        """A vocabulary of the 256 bytes and an end token. It is enough to check whether a grammar can be compiled."""
        return Vocabulary(
            [*(bytes([i]) for i in range(256)), b""], end_ids=[256], encode=lambda text: list(text.encode())
        )


class _Wrapped:
    """The attributes that `TokenizerWrapper` reads."""

    bos_token_id = None
    special_token_ids: Sequence[int] = ()

    def __init__(self, tokens: Sequence[bytes], end_id: int, encode: Callable[[str], list[int]]) -> None:
        self.tokens = tokens
        self.eos_token_id = end_id
        self._encode = encode

    def __call__(self, text: bytes) -> list[int]:
        return self._encode(text.decode("utf-8", errors="replace"))


def compile_grammar(grammar: str, vocabulary: Vocabulary) -> LLMatcher:
    """A matcher at the grammar's start. Releases the GIL. Raises GrammarError."""
    from llguidance import LLMatcher, LLParserLimits

    options: dict[str, Any] = {**STEP_LIMITS, **COMPILE_LIMITS}
    limits = LLParserLimits(**options, verbose_errors=False)
    matcher = LLMatcher(vocabulary.tokenizer, grammar, limits=limits, log_level=0)
    if matcher.is_error():
        raise GrammarError(error_of(matcher))
    return matcher


def error_of(matcher: LLMatcher) -> str:
    """The matcher's error in one line, without the grammar's text and the traces after it."""
    message = str(matcher.get_error())
    if message.startswith("panic"):
        return "the grammar's compiler failed on it"
    lines = (line.strip() for line in message.split("<state>")[0].splitlines())
    return " ".join(line for line in lines if line and not line.startswith("<"))[:MAX_MESSAGE_CHARS]
