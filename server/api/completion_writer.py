"""The answers of /v1/completions: one object, or chunks. A chunk has the very shape of the object."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from server.api.logprobs import completion_logprobs, prompt_logprobs
from server.api.usage import UsageOptions, usage
from server.engine import wire
from server.engine.generation import Choice, Generation, ScoredToken
from server.http.json_pieces import LongText, NestedList, event_pieces, json_pieces, list_of
from server.http.sse import ChunkTemplate, encode_json, event
from server.text.stream import TextStream
from server.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    ids: list[int]
    text: str  # as it was given, or decoded


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionOptions:
    model: str
    created: int
    prompts: list[Prompt]
    n: int
    echo: bool
    discard_output: bool  # max_tokens 0: one hidden step was run, only the prompt is shown
    logprobs: int | None
    num_prompt_logprobs: int | None
    usage: UsageOptions


class CompletionWriter:
    def __init__(self, generation: Generation, tokenizer: Tokenizer, options: CompletionOptions) -> None:
        self._generation = generation
        self._tokenizer = tokenizer
        self._options = options
        self._templates: dict[int, ChunkTemplate] = {}
        self._plain = options.logprobs is None and not options.usage.in_every_chunk

    def whole(self) -> Iterator[bytes]:
        choices = self._generation.choices
        body = self._base(NestedList(map(self._whole_choice, choices)))
        return json_pieces(body | {"usage": self._usage(choices, self._options.n)})

    def frames(self, choice: Choice) -> Iterator[bytes]:
        frames: list[Iterable[bytes]] = []
        text, scored = self._take(choice)
        if choice.index not in self._templates:
            self._templates[choice.index] = ChunkTemplate(self._chunk(choice, ChunkTemplate.HOLE))
            if self._options.echo:
                chunk = self._chunk(choice, LongText(self._prompt(choice).text))
                if self._options.logprobs is not None:
                    chunk["choices"][0]["logprobs"] = self._scores(choice, [], prompt=True)
                frames.append(event_pieces(chunk))
        if self._plain:
            if text:
                frames.append(map(self._templates[choice.index].fill, [text]))
        elif text or scored or self._options.usage.in_every_chunk:
            chunk = self._chunk(choice, text)
            if self._options.logprobs is not None:
                chunk["choices"][0]["logprobs"] = self._scores(choice, scored)
            frames.append(event_pieces(chunk))
        if choice.finish_reason is not None:
            chunk = self._chunk(choice, "")
            chunk["choices"][0] |= self._ending(choice)
            frames.append([event(encode_json(chunk))])
        return chain.from_iterable(frames)

    def last_frames(self) -> bytes:
        if not self._options.usage.in_stream:
            return b""
        counts = self._usage(self._generation.choices, self._options.n)
        return event(encode_json(self._base([]) | {"usage": counts}))

    def _take(self, choice: Choice) -> tuple[str, list[ScoredToken]]:
        text, scored = choice.take()
        return ("", []) if self._options.discard_output else (text, scored)

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        options = self._options
        text, scored = self._take(choice)
        part: dict[str, Any] = {
            "index": choice.index,
            "text": LongText(self._prompt(choice).text + text if options.echo else text),
            "logprobs": None if options.logprobs is None else self._scores(choice, scored, prompt=options.echo),
            **self._ending(choice),
        }
        if options.num_prompt_logprobs is not None:
            ids, scores = self._prompt(choice).ids, self._prompt_logprobs(choice)
            entries = prompt_logprobs(self._tokenizer, ids, scores, options.num_prompt_logprobs)
            part["prompt_logprobs"] = list_of(entries, len(ids))
        return part

    def _ending(self, choice: Choice) -> dict[str, Any]:
        if self._options.discard_output:
            return {"finish_reason": "length", "stop_reason": None}
        return {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}

    def _prompt(self, choice: Choice) -> Prompt:
        return self._options.prompts[choice.index // self._options.n]

    def _prompt_logprobs(self, choice: Choice) -> list[wire.Logprobs]:
        """The engine scores a prompt once where its choices are answered together, and for each where they are not."""
        first = self._generation.choices[choice.index - choice.index % self._options.n]
        return choice.prompt_logprobs or first.prompt_logprobs or []

    def _scores(self, choice: Choice, scored: list[ScoredToken], *, prompt: bool = False) -> dict[str, Any]:
        """Of the tokens that were drawn; with `prompt`, of the prompt's own before them."""
        base = len(self._prompt(choice).text) if self._options.echo else 0

        def tokens() -> Iterator[ScoredToken]:
            if prompt:
                yield from self._prompt_tokens(choice)
            for token in scored:
                yield ScoredToken(token.token_id, base + token.offset, token.scores)

        count = len(scored) + (len(self._prompt(choice).ids) if prompt else 0)
        return completion_logprobs(self._tokenizer, tokens, count, self._options.logprobs or 0)

    def _prompt_tokens(self, choice: Choice) -> Iterator[ScoredToken]:
        stream = TextStream(self._tokenizer)
        scores = chain([None], self._prompt_logprobs(choice))
        for id, score in zip(self._prompt(choice).ids, scores, strict=True):
            yield ScoredToken(id, stream.num_chars, score)
            stream.push(id)

    def _chunk(self, choice: Choice, text: str | LongText) -> dict[str, Any]:
        part = {"index": choice.index, "text": text, "logprobs": None, "finish_reason": None}
        chunk = self._base([part])
        if self._options.usage.in_stream:
            chunk["usage"] = self._usage([choice], 1) if self._options.usage.in_every_chunk else None
        return chunk

    def _base(self, choices: list[dict[str, Any]] | NestedList) -> dict[str, Any]:
        return {
            "id": self._generation.request_id,
            "object": "text_completion",
            "created": self._options.created,
            "model": self._options.model,
            "choices": choices,
        }

    def _usage(self, choices: list[Choice], n: int) -> dict[str, Any]:
        hidden = 1 if self._options.discard_output else 0
        return usage(choices, n, show_cached=self._options.usage.show_cached, hidden_tokens=hidden)
