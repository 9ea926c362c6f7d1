"""Converts token ids to text one by one: joins bytes to characters, separates the reasoning, and searches the answer
for stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from server.text.reasoning import ReasoningReader
from server.text.stop_strings import StopFinder, StopStrings
from server.text.tokenizer import ByteLevelTokenizer


class Detokenizer:
    """Converts ids to characters. A character whose bytes are in several tokens appears with its last byte. Bytes that
    are not UTF-8 become U+FFFD, exactly as if the whole text were decoded at once."""

    __slots__ = ("_decoder", "_partial", "_skip", "_table", "num_before")

    def __init__(self, tokenizer: ByteLevelTokenizer, *, skip_special_tokens: bool = True) -> None:
        self._table = tokenizer.token_bytes
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._partial = False  # the decoder holds the first bytes of a character
        self.num_before = 0  # characters of the last `push` that stand for earlier tokens alone: U+FFFD, at most 2

    def push(self, token_id: int) -> str:
        self.num_before = 0
        if token_id in self._skip or token_id >= len(self._table):
            return ""
        raw = self._table[token_id]
        if not self._partial and raw.isascii():
            return raw.decode("ascii")
        text = self._decoder.decode(raw[:1])
        self._partial = bool(self._decoder.getstate()[0])
        # More than one character, or its first bytes: the first byte does not go on with what the decoder held.
        self.num_before = max(0, len(text) + self._partial - 1)
        text += self._decoder.decode(raw[1:])
        self._partial = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        self._partial = False
        return self._decoder.decode(b"", True)


class TextStream:
    """The text of one sequence. `num_chars` is the number of characters decoded so far, including hidden ones.

    `start` is the offset of the last token's text. Tokens that form one character together all have its offset, and so
    does a token that ends one character and begins another. A token that is not shown has no characters.

    `reasoning` reads the text first; None: all of it is the answer. Stop strings are searched for in the answer, except
    in the first `min_tokens` tokens.
    """

    __slots__ = (
        "_detokenizer",
        "_min_tokens",
        "_num_tokens",
        "_searched_from",
        "_stops",
        "num_chars",
        "reasoning",
        "start",
    )

    def __init__(
        self,
        tokenizer: ByteLevelTokenizer,
        *,
        stops: StopStrings | None = None,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        reasoning: ReasoningReader | None = None,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._stops = None if stops is None else StopFinder(stops, include_in_output=include_stop)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._searched_from = 0  # the number of characters of the first `min_tokens` tokens
        self.num_chars = self.start = 0
        self.reasoning = reasoning

    @property
    def matched_stop(self) -> str | None:
        """The stop string that has ended the text; None: none has."""
        return self._stops.matched if self._stops else None

    def push(self, token_id: int) -> str:
        """Adds a token. Returns the part of the answer that may now be shown. Must not be called once `matched_stop` is
        set."""
        text = self._detokenizer.push(token_id)
        self._num_tokens += 1
        self.start = self.num_chars + self._detokenizer.num_before
        self.num_chars += len(text)
        if self._num_tokens <= self._min_tokens:
            self._searched_from = self.num_chars
        return self._searched(text if self.reasoning is None else self.reasoning.push(text))

    def finish(self) -> str:
        """The rest of the answer at the end of the sequence: an incomplete character, and text held back for a tag or a
        stop string."""
        if self.matched_stop is not None:
            return ""
        rest = self._detokenizer.flush()
        self.num_chars += len(rest)
        if self.reasoning is not None:
            rest = self.reasoning.push(rest) + self.reasoning.finish()
        rest = self._searched(rest)
        return rest + self._stops.flush() if self._stops is not None else rest

    def _searched(self, text: str) -> str:
        """The given text without a stop string, and without the characters that may become one. The text has just been
        decoded."""
        if self._stops is None or not text:
            return text
        at = max(0, self._searched_from - (self.num_chars - len(text)))
        return text[:at] + self._stops.push(text[at:])


class NoText(TextStream):
    """A TextStream that decodes nothing, for sequences whose text is not shown and that have no stop strings."""

    __slots__ = ()

    def push(self, token_id: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


def decode_text(tokenizer: ByteLevelTokenizer, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
    """The text of a complete sequence of ids."""
    stream = TextStream(tokenizer, skip_special_tokens=skip_special_tokens)
    return "".join([stream.push(id) for id in ids]) + stream.finish()
