"""The answers of /v1/chat/completions: one object, or chunks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from server.api.choices_writer import ChoicesWriter
from server.api.logprobs import chat_entries, prompt_logprobs
from server.api.writer import AnswerHead
from server.engine.generation import Choice, Gain, Generation, ScoredToken
from server.http.json_pieces import LongText, list_of
from server.http.sse import encode_json, event
from server.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatOptions:
    prompt: list[int]
    top_logprobs: int | None  # None: no log-probabilities
    num_prompt_logprobs: int | None


class ChatWriter(ChoicesWriter):
    WHOLE = "chat.completion"
    CHUNK = "chat.completion.chunk"

    def __init__(self, generation: Generation, head: AnswerHead, tokenizer: Tokenizer, options: ChatOptions) -> None:
        super().__init__(generation, head, scores=options.top_logprobs is not None)
        self._tokenizer = tokenizer
        self._options = options

    def opening(self, choice: Choice) -> Iterable[bytes]:
        chunk = self._chunk(choice, {"delta": {"role": "assistant", "content": ""}})
        return [event(encode_json(chunk))]

    def _whole_choice(self, choice: Choice, gain: Gain) -> dict[str, Any]:
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": LongText(gain.text), "refusal": None},
            "logprobs": self._scores(choice, gain.scored) if self._scores_shown else None,
            **self._ending(choice),
        }

    def _text_fields(self, text: str | LongText) -> dict[str, Any]:
        return {"delta": {"content": text}}

    def _end_fields(self) -> dict[str, Any]:
        return {"delta": {}}

    def _scores(self, choice: Choice, scored: list[ScoredToken]) -> dict[str, Any]:
        entries = chat_entries(self._tokenizer, scored, self._options.top_logprobs or 0)
        return {"content": list_of(entries, len(scored)), "refusal": None}

    def _whole_fields(self) -> dict[str, Any]:
        prompt, num_top = self._options.prompt, self._options.num_prompt_logprobs
        if num_top is None:
            return {}
        entries = prompt_logprobs(self._tokenizer, prompt, self._generation.choices[0].prompt_logprobs or [], num_top)
        return {"prompt_logprobs": list_of(entries, len(prompt))}
