"""The answers of /v1/chat/completions: one object, or chunks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from server.api.logprobs import chat_entries, prompt_logprobs
from server.api.usage import UsageOptions, usage
from server.engine.generation import Choice, Generation, ScoredToken
from server.http.json_pieces import LongText, NestedList, event_pieces, json_pieces, list_of
from server.http.sse import ChunkTemplate, encode_json, event
from server.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatOptions:
    model: str
    created: int
    prompt: list[int]
    top_logprobs: int | None  # None: no log-probabilities
    num_prompt_logprobs: int | None
    usage: UsageOptions


class ChatWriter:
    def __init__(self, generation: Generation, tokenizer: Tokenizer, options: ChatOptions) -> None:
        self._generation = generation
        self._tokenizer = tokenizer
        self._options = options
        self._templates: dict[int, ChunkTemplate] = {}
        # a chunk of which only the text changes is encoded from a template
        self._plain = options.top_logprobs is None and not options.usage.in_every_chunk

    def whole(self) -> Iterator[bytes]:
        options, choices = self._options, self._generation.choices
        body = self._base("chat.completion", NestedList(map(self._whole_choice, choices)))
        body["usage"] = self._usage()
        if options.num_prompt_logprobs is not None:
            scores = choices[0].prompt_logprobs or []
            entries = prompt_logprobs(self._tokenizer, options.prompt, scores, options.num_prompt_logprobs)
            body["prompt_logprobs"] = list_of(entries, len(options.prompt))
        return json_pieces(body)

    def frames(self, choice: Choice) -> Iterator[bytes]:
        frames: list[Iterable[bytes]] = []
        if choice.index not in self._templates:
            delta = {"role": "assistant", "content": ""}
            frames.append([event(encode_json(self._chunk(choice, delta)))])
            hole = {"content": ChunkTemplate.HOLE}
            self._templates[choice.index] = ChunkTemplate(self._chunk(choice, hole))
        text, scored = choice.take()
        if self._plain:
            if text:
                frames.append(map(self._templates[choice.index].fill, [text]))
        elif text or scored or self._options.usage.in_every_chunk:
            chunk = self._chunk(choice, {"content": text})
            if self._options.top_logprobs is not None:
                chunk["choices"][0]["logprobs"] = self._logprobs(scored)
            frames.append(event_pieces(chunk))
        if choice.finish_reason is not None:
            chunk = self._chunk(choice, {})
            chunk["choices"][0] |= {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
            frames.append([event(encode_json(chunk))])
        return chain.from_iterable(frames)

    def last_frames(self) -> bytes:
        if not self._options.usage.in_stream:
            return b""
        return event(encode_json(self._base("chat.completion.chunk", []) | {"usage": self._usage()}))

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        text, scored = choice.take()
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": LongText(text), "refusal": None},
            "logprobs": None if self._options.top_logprobs is None else self._logprobs(scored),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }

    def _chunk(self, choice: Choice, delta: dict[str, Any]) -> dict[str, Any]:
        part = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
        chunk = self._base("chat.completion.chunk", [part])
        if self._options.usage.in_stream:
            counts = usage([choice], 1, show_cached=self._options.usage.show_cached)
            chunk["usage"] = counts if self._options.usage.in_every_chunk else None
        return chunk

    def _base(self, kind: str, choices: list[dict[str, Any]] | NestedList) -> dict[str, Any]:
        options = self._options
        return {
            "id": self._generation.request_id,
            "object": kind,
            "created": options.created,
            "model": options.model,
            "choices": choices,
        }

    def _logprobs(self, scored: list[ScoredToken]) -> dict[str, Any]:
        entries = chat_entries(self._tokenizer, scored, self._options.top_logprobs or 0)
        return {"content": list_of(entries, len(scored)), "refusal": None}

    def _usage(self) -> dict[str, Any]:
        choices = self._generation.choices
        return usage(choices, len(choices), show_cached=self._options.usage.show_cached)
