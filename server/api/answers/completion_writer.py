"""The answers of /v1/completions: one object, or chunks. A chunk has the same shape as the object."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from server.api.answers.choices_writer import ChoicesWriter
from server.api.answers.logprobs import completion_logprobs, prompt_logprobs
from server.api.answers.writer import AnswerHead
from server.engine import wire
from server.engine.generation import Choice, ChoiceDelta, Generation, ScoredToken
from server.http.encoding import event_pieces
from server.text.stream import TextStream
from server.text.tokenizer import ByteLevelTokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A prompt as token ids and as text."""

    ids: list[int]
    text: str  # as it was given, or decoded with its special tokens
    shown: range  # the places of the ids that stand in `text`: not those that the tokenizer adds to a given text


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionOptions:
    """The options of a completion's answer."""

    prompts: list[Prompt]
    echo: bool
    discard_output: bool  # max_tokens 0: one token is generated but not shown
    logprobs: int | None
    num_prompt_logprobs: int | None


class CompletionWriter(ChoicesWriter):
    """Writes completions and their chunks."""

    WHOLE = CHUNK = "text_completion"

    def __init__(
        self, generation: Generation, head: AnswerHead, tokenizer: ByteLevelTokenizer, options: CompletionOptions
    ) -> None:
        hidden_tokens = 1 if options.discard_output else 0
        super().__init__(generation, head, tokenizer, num_top=options.logprobs, hidden_tokens=hidden_tokens)
        self._options = options

    def opening(self, choice: Choice) -> Iterable[bytes]:
        if not (self._options.echo or self._head.token_ids):
            return ()
        prompt = self._prompt(choice)
        text = prompt.text if self._options.echo else ""
        fields = self._text_fields(text) | self._prompt_ids(prompt.ids) | self._ids_fields(ChoiceDelta())
        chunk = self._chunk(choice, fields, opens=True)
        if self._scores_shown:
            chunk["choices"][0]["logprobs"] = self._scores(choice, [], prompt=self._options.echo)
        return event_pieces(chunk)

    def gained(self, choice: Choice, choice_delta: ChoiceDelta) -> Iterable[bytes]:
        return super().gained(choice, self._shown(choice_delta))

    def _shown(self, choice_delta: ChoiceDelta) -> ChoiceDelta:
        return ChoiceDelta() if self._options.discard_output else choice_delta

    def _whole_choice(self, choice: Choice, choice_delta: ChoiceDelta) -> dict[str, Any]:
        options, prompt, shown = self._options, self._prompt(choice), self._shown(choice_delta)
        return {
            "index": choice.index,
            "text": prompt.text + shown.text if options.echo else shown.text,
            "logprobs": self._scores(choice, shown.scored, prompt=options.echo) if self._scores_shown else None,
            **self._ending(choice),
            **self._prompt_ids(prompt.ids),
            **self._ids_fields(shown),
            **prompt_logprobs(self._tokenizer, prompt.ids, self._prompt_logprobs(choice), options.num_prompt_logprobs),
        }

    def _text_fields(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _ending(self, choice: Choice) -> dict[str, Any]:
        hidden = {"finish_reason": "length", "stop_reason": None} if self._options.discard_output else {}
        return super()._ending(choice) | hidden

    def _prompt(self, choice: Choice) -> Prompt:
        return self._options.prompts[choice.index // self._head.n]

    def _prompt_logprobs(self, choice: Choice) -> list[wire.Logprobs]:
        """The prompt's log-probabilities. Without streaming only the first choice of a prompt has them."""
        first = self._generation.choices[choice.index - choice.index % self._head.n]
        return choice.prompt_logprobs or first.prompt_logprobs or []

    def _scores(self, choice: Choice, scored: list[ScoredToken], *, prompt: bool = False) -> dict[str, Any]:
        """`logprobs` of the drawn tokens; with `prompt`, the prompt's tokens come first."""
        base = len(self._prompt(choice).text) if self._options.echo else 0

        def tokens() -> Iterator[ScoredToken]:
            if prompt:
                yield from self._prompt_tokens(choice)
            for token in scored:
                yield ScoredToken(token.token_id, base + token.offset, token.scores)

        count = len(scored) + (len(self._prompt(choice).ids) if prompt else 0)
        return completion_logprobs(self._tokenizer, tokens, count, self._num_top, as_ids=self._head.names_are_ids)

    def _prompt_tokens(self, choice: Choice) -> Iterator[ScoredToken]:
        prompt, stream = self._prompt(choice), TextStream(self._tokenizer, skip_special_tokens=False)
        scores = chain([None], self._prompt_logprobs(choice))
        for i, (id, score) in enumerate(zip(prompt.ids, scores, strict=True)):
            if i in prompt.shown:
                stream.push(id)
            yield ScoredToken(id, stream.start if i in prompt.shown else stream.num_chars, score)
