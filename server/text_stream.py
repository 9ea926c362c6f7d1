"""Token ids to text as they come: bytes joined into characters, stop strings found and never shown half.

Text is released as soon as it can no longer become part of a stop string: what is held back is the longest tail that
begins one. Where several stop strings match, the one that is complete first ends the text, and of those that are
complete at the same character the longest; so the result does not depend on how the text was cut into tokens.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from server.tokenizer import Tokenizer


class Detokenizer:
    """Ids to characters. A character whose bytes are spread over tokens appears with its last byte; bytes that are
    not UTF-8 become U+FFFD exactly as decoding the whole at once would make them."""

    __slots__ = ("_decode", "_partial", "_skip", "_table")

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._table = tokenizer.token_bytes
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._partial = False  # the decoder holds the first bytes of a character

    def push(self, token_id: int) -> str:
        if token_id in self._skip or token_id >= len(self._table):
            return ""
        raw = self._table[token_id]
        if not self._partial and raw.isascii():
            return raw.decode("ascii")
        text = self._decode(raw)
        self._partial = not text or raw[-1] >= 0x80
        return text

    def flush(self) -> str:
        self._partial = False
        return self._decode(b"", True)


class StopStrings:
    """Finds the first stop string in a growing text; `push` returns what may be shown."""

    __slots__ = ("_held", "_include", "_stops", "matched")

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False) -> None:
        self._stops = tuple(sorted(stops, key=len, reverse=True))
        self._include = include_in_output
        self._held = ""
        self.matched: str | None = None  # once set, the text is over

    def push(self, text: str) -> str:
        buffer = self._held + text
        best_end, best = len(buffer) + 1, None
        for stop in self._stops:
            start = buffer.find(stop)
            if start >= 0 and start + len(stop) < best_end:
                best_end, best = start + len(stop), stop
        if best is not None:
            self.matched, self._held = best, ""
            return buffer[: best_end if self._include else best_end - len(best)]
        cut = len(buffer) - self._num_held(buffer)
        self._held = buffer[cut:]
        return buffer[:cut]

    def flush(self) -> str:
        """What was held back, once it is known that nothing follows."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, buffer: str) -> int:
        longest = 0
        for stop in self._stops:
            start = buffer.find(stop[0], max(0, len(buffer) - len(stop) + 1))
            while start >= 0 and len(buffer) - start > longest:
                if stop.startswith(buffer[start:]):
                    longest = len(buffer) - start
                    break
                start = buffer.find(stop[0], start + 1)
        return longest


class TextStream:
    """One sequence's text. `num_chars` counts the characters decoded so far, shown or not: where the next token's text
    begins. Stop strings count only from the token after `min_tokens`."""

    __slots__ = ("_detokenizer", "_min_tokens", "_num_tokens", "_stops", "num_chars")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._stops = StopStrings(stops, include_in_output=include_stop) if stops else None
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self.num_chars = 0

    @property
    def matched_stop(self) -> str | None:
        return self._stops.matched if self._stops else None

    def push(self, token_id: int) -> str:
        """The text that this token makes certain. Not to be called once `matched_stop` is set."""
        text = self._detokenizer.push(token_id)
        self._num_tokens += 1
        self.num_chars += len(text)
        if self._stops is None or not text or self._num_tokens <= self._min_tokens:
            return text
        return self._stops.push(text)

    def finish(self) -> str:
        """What is left at the end of the sequence: a broken character, and text held back for a stop string."""
        rest = self._detokenizer.flush()
        if self._stops is None:
            return rest
        return self._stops.push(rest) + self._stops.flush() if self.matched_stop is None else ""


def decode_text(tokenizer: Tokenizer, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
    """The text of ids that are all there."""
    stream = TextStream(tokenizer, skip_special_tokens=skip_special_tokens)
    return "".join([stream.push(id) for id in ids]) + stream.finish()
