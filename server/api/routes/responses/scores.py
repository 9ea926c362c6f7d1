"""Log-probabilities in the two forms of the Responses API: those of a whole text, and those of a delta."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from server.api.answers.logprobs import chat_entries
from server.engine.generation import ScoredToken
from server.http.encoding import LongList, list_of
from server.text.tokenizer import ByteLevelTokenizer

BYTES_OF_A_TOKEN = 300  # about what a scored token takes in memory besides its most likely tokens


class ScoreWriter:
    """Writes scored tokens with their `num_top` most likely ones."""

    def __init__(self, tokenizer: ByteLevelTokenizer, num_top: int) -> None:
        self._tokenizer = tokenizer
        self.num_top = num_top

    def whole(self, scored: Sequence[ScoredToken]) -> list[Any] | LongList:
        """`logprobs` of a whole text."""
        return list_of(chat_entries(self._tokenizer, scored, self.num_top), len(scored))

    def in_event(self, scored: Sequence[ScoredToken]) -> list[Any] | LongList:
        """`logprobs` of an event. Tokens are without their bytes."""
        return list_of(self._without_bytes(scored), len(scored))

    def _without_bytes(self, scored: Sequence[ScoredToken]) -> Iterator[dict[str, Any]]:
        for entry in chat_entries(self._tokenizer, scored, self.num_top):
            top = [{"token": each["token"], "logprob": each["logprob"]} for each in entry["top_logprobs"]]
            yield {"token": entry["token"], "logprob": entry["logprob"], "top_logprobs": top}


def num_bytes_of(scored: Sequence[ScoredToken]) -> int:
    """Their size in memory, approximately."""
    sizes = (len(token.scores.top_ids) + len(token.scores.top_logprobs) for token in scored if token.scores)
    return BYTES_OF_A_TOKEN * len(scored) + sum(sizes)
