"""The answers of /v1/completions: one object, or chunks. A chunk has the very shape of the object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from server import wire
from server.generation import Choice, Generation, ScoredToken
from server.logprobs import completion_logprobs, prompt_logprobs, token_text
from server.sse import ChunkTemplate, encode_json, event
from server.text_stream import TextStream
from server.tokenizer import Tokenizer
from server.usage import UsageOptions, usage


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

    def whole(self) -> bytes:
        choices = [self._whole_choice(choice) for choice in self._generation.choices]
        return encode_json(self._base(choices) | {"usage": self._usage(self._generation.choices, self._options.n)})

    def frames(self, choice: Choice) -> bytes:
        out = b""
        text, scored = self._take(choice)
        if choice.index not in self._templates:
            self._templates[choice.index] = ChunkTemplate(self._chunk(choice, ChunkTemplate.HOLE))
            if self._options.echo:
                chunk = self._chunk(choice, self._prompt(choice).text)
                if self._options.logprobs is not None:
                    chunk["choices"][0]["logprobs"] = self._prompt_scores(choice)
                out = event(encode_json(chunk))
        if self._plain:
            if text:
                out += self._templates[choice.index].fill(text)
        elif text or scored or self._options.usage.in_every_chunk:
            chunk = self._chunk(choice, text)
            if self._options.logprobs is not None:
                chunk["choices"][0]["logprobs"] = self._scores(choice, scored)
            out += event(encode_json(chunk))
        if choice.finish_reason is not None:
            chunk = self._chunk(choice, "")
            chunk["choices"][0] |= self._ending(choice)
            out += event(encode_json(chunk))
        return out

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
        logprobs = None
        if options.logprobs is not None:
            logprobs = self._scores(choice, scored)
            if options.echo:
                ahead = self._prompt_scores(choice)
                logprobs = {name: ahead[name] + values for name, values in logprobs.items()}
        part: dict[str, Any] = {
            "index": choice.index,
            "text": self._prompt(choice).text + text if options.echo else text,
            "logprobs": logprobs,
            **self._ending(choice),
        }
        if options.num_prompt_logprobs is not None:
            ids, scores = self._prompt(choice).ids, choice.prompt_logprobs or []
            part["prompt_logprobs"] = prompt_logprobs(self._tokenizer, ids, scores, options.num_prompt_logprobs)
        return part

    def _ending(self, choice: Choice) -> dict[str, Any]:
        if self._options.discard_output:
            return {"finish_reason": "length", "stop_reason": None}
        return {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}

    def _prompt(self, choice: Choice) -> Prompt:
        return self._options.prompts[choice.index // self._options.n]

    def _prompt_scores(self, choice: Choice) -> dict[str, list[Any]]:
        """The prompt's own tokens, the first of which nothing predicts."""
        ids = self._prompt(choice).ids
        stream = TextStream(self._tokenizer)
        offsets = []
        for id in ids:
            offsets.append(stream.num_chars)
            stream.push(id)
        scores: list[wire.Logprobs] = choice.prompt_logprobs or []
        scored = [ScoredToken(*item) for item in zip(ids[1:], offsets[1:], scores, strict=True)]
        rest = completion_logprobs(self._tokenizer, scored, self._options.logprobs or 0)
        return {
            "text_offset": offsets,
            "token_logprobs": [None, *rest["token_logprobs"]],
            "tokens": [token_text(self._tokenizer, ids[0]), *rest["tokens"]],
            "top_logprobs": [None, *rest["top_logprobs"]],
        }

    def _scores(self, choice: Choice, scored: list[ScoredToken]) -> dict[str, list[Any]]:
        base = len(self._prompt(choice).text) if self._options.echo else 0
        return completion_logprobs(self._tokenizer, scored, self._options.logprobs or 0, base_offset=base)

    def _chunk(self, choice: Choice, text: str) -> dict[str, Any]:
        part = {"index": choice.index, "text": text, "logprobs": None, "finish_reason": None}
        chunk = self._base([part])
        if self._options.usage.in_stream:
            chunk["usage"] = self._usage([choice], 1) if self._options.usage.in_every_chunk else None
        return chunk

    def _base(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
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
