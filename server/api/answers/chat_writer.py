"""The answers of /v1/chat/completions: one object, or chunks."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from batcher.request import FinishReason
from server.api.answers.choices_writer import ChoicesWriter
from server.api.answers.logprobs import chat_entries, prompt_logprobs
from server.api.answers.writer import AnswerHead
from server.engine.generation import Choice, ChoiceDelta, Generation, ScoredToken
from server.http.encoding import event_pieces, list_of
from server.text.tokenizer import ByteLevelTokenizer
from server.text.tool_calls.pieces import CallDelta, Content, Piece, Reasoning


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatOptions:
    """The options of a chat's answer."""

    prompt: list[int]
    top_logprobs: int | None  # None: no log-probabilities
    num_prompt_logprobs: int | None
    echo: str = ""  # text before the generated text
    reads_reasoning: bool = False  # a message without reasoning has null fields for it
    is_named_call: bool = False  # whether the request named the function: the finish reason is not `tool_calls`


class ChatWriter(ChoicesWriter):
    """Writes chat completions and their chunks."""

    WHOLE = "chat.completion"
    CHUNK = "chat.completion.chunk"

    def __init__(
        self, generation: Generation, head: AnswerHead, tokenizer: ByteLevelTokenizer, options: ChatOptions
    ) -> None:
        super().__init__(generation, head, tokenizer, num_top=options.top_logprobs)
        self._options = options

    def opening(self, choice: Choice) -> Iterable[bytes]:
        first = self._chunk(choice, {"delta": {"role": "assistant", "content": ""}}, opens=True)
        chunks = [first | self._prompt_ids(self._options.prompt) if self._head.token_ids else first]
        if self._options.echo:
            chunks.append(self._chunk(choice, self._text_fields(self._options.echo), opens=True))
        return chain.from_iterable(map(event_pieces, chunks))

    def _delta_fields(self, choice_delta: ChoiceDelta) -> list[dict[str, Any]]:
        if choice_delta.is_content:
            return super()._delta_fields(choice_delta)
        if self._head.usage.in_every_chunk:  # one chunk, for each counts more tokens than the last
            return [_joined_fields(choice_delta)]
        return [self._piece_fields(piece) for piece in choice_delta.pieces]

    def _piece_fields(self, piece: Piece) -> dict[str, Any]:
        if isinstance(piece, Content):
            return self._text_fields(piece.text)
        if isinstance(piece, Reasoning):
            return {"delta": _reasoning_fields(piece.text)}
        return {"delta": {"tool_calls": [_delta_fields(piece)]}}

    def _ending(self, choice: Choice) -> dict[str, Any]:
        fields = super()._ending(choice)
        has_called = choice.num_calls and not self._options.is_named_call
        if has_called and choice.finish_reason == FinishReason.STOP.value:
            fields["finish_reason"] = "tool_calls"
        return fields

    def _whole_choice(self, choice: Choice, choice_delta: ChoiceDelta) -> dict[str, Any]:
        calls = {"tool_calls": [_call_fields(call) for call in choice_delta.calls]} if choice_delta.calls else {}
        reasoning = (
            _reasoning_fields(choice_delta.reasoning) if choice_delta.reasoning or self._options.reads_reasoning else {}
        )
        text = self._options.echo + choice_delta.text
        content = text if text or not calls else None
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": content, "refusal": None, **reasoning, **calls},
            "logprobs": self._scores(choice, choice_delta.scored) if self._scores_shown else None,
            **self._ending(choice),
            **self._ids_fields(choice_delta),
        }

    def _text_fields(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}

    def _end_fields(self) -> dict[str, Any]:
        return {"delta": {}}

    def _scores(self, choice: Choice, scored: list[ScoredToken]) -> dict[str, Any]:
        entries = chat_entries(self._tokenizer, scored, self._num_top, as_ids=self._head.names_are_ids)
        return {"content": list_of(entries, len(scored)), "refusal": None}

    def _whole_fields(self) -> dict[str, Any]:
        prompt, num_top = self._options.prompt, self._options.num_prompt_logprobs
        scores = self._generation.choices[0].prompt_logprobs
        return {**prompt_logprobs(self._tokenizer, prompt, scores, num_top), **self._prompt_ids(prompt)}


class BatchChatWriter(ChatWriter):
    """Writes the answers to several conversations, with one choice for each."""

    def __init__(
        self, generation: Generation, head: AnswerHead, tokenizer: ByteLevelTokenizer, options: Sequence[ChatOptions]
    ) -> None:
        super().__init__(generation, head, tokenizer, options[0])
        self._options_of = options

    def _whole_choice(self, choice: Choice, choice_delta: ChoiceDelta) -> dict[str, Any]:
        self._options = self._options_of[choice.index]
        return super()._whole_choice(choice, choice_delta) | self._prompt_ids(self._options.prompt)

    def _whole_fields(self) -> dict[str, Any]:
        return {}


def _joined_fields(choice_delta: ChoiceDelta) -> dict[str, Any]:
    """The fields of one delta with content and the additions to each call."""
    joined: dict[int, CallDelta] = {}
    for call in choice_delta.calls:
        before = joined.get(call.index)
        joined[call.index] = call if before is None else replace(before, arguments=before.arguments + call.arguments)
    content = {"content": choice_delta.text} if choice_delta.text else {}
    reasoning = _reasoning_fields(choice_delta.reasoning) if choice_delta.reasoning else {}
    calls = {"tool_calls": [_delta_fields(call) for call in joined.values()]} if joined else {}
    return {"delta": {**reasoning, **content, **calls}}


def _reasoning_fields(text: str) -> dict[str, Any]:
    """The reasoning under DeepSeek's name of the field and under vLLM's newer one."""
    shown = text or None
    return {"reasoning_content": shown, "reasoning": shown}


def _delta_fields(call: CallDelta) -> dict[str, Any]:
    return {"index": call.index, **_call_fields(call)}


def _call_fields(call: CallDelta) -> dict[str, Any]:
    """The fields of a call. Its first delta also has the id and the name."""
    arguments = {"arguments": call.arguments}
    if call.name is None:
        return {"function": arguments}
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": {"name": call.name, **arguments}}
