"""Answers with a list of `choices`, as in chat and completions: one object, or chunks with one choice each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any, ClassVar

from server.api.answers.logprobs import finite, scores_by_id
from server.api.answers.writer import AnswerHead
from server.engine.generation import Choice, ChoiceDelta, Generation, ScoredToken
from server.http.encoding import DONE, ChunkTemplate, NestedList, encode_json, event, event_pieces, list_of
from server.http.request_error import RequestError
from server.text.tokenizer import ByteLevelTokenizer

Fields = dict[str, Any]


class ChoicesWriter(ABC):
    """A `Writer`. Subclasses define the fields of one choice, in the whole answer and in a chunk.

    Args:
        num_top: the number of tokens whose log-probabilities are shown with each token; None: none are shown.
        hidden_tokens: tokens of each output that are neither shown nor counted.
    """

    WHOLE: ClassVar[str]  # the field `object` of the whole answer
    CHUNK: ClassVar[str]  # the field `object` of a chunk

    def __init__(
        self,
        generation: Generation,
        head: AnswerHead,
        tokenizer: ByteLevelTokenizer,
        *,
        num_top: int | None,
        hidden_tokens: int = 0,
    ) -> None:
        self._generation = generation
        self._head = head
        self._tokenizer = tokenizer
        self._num_top = num_top or 0
        self._by_id = num_top is not None and head.logprobs_by_id
        self._scores_shown = num_top is not None and not self._by_id
        self._hidden_tokens = hidden_tokens
        self._templates: dict[int, ChunkTemplate] = {}
        # if only the text of chunks changes, they are encoded from a template
        self._plain = not (num_top is not None or head.usage.in_every_chunk or head.token_ids or head.sampled_logprobs)

    # the fields of a choice

    @abstractmethod
    def _whole_choice(self, choice: Choice, choice_delta: ChoiceDelta) -> Fields: ...

    @abstractmethod
    def _text_fields(self, text: str) -> Fields:
        """The text field of a chunk's choice."""

    def _delta_fields(self, choice_delta: ChoiceDelta) -> list[Fields]:
        """The fields of a choice's new output, one entry per chunk."""
        return [self._text_fields(choice_delta.text)]

    def _end_fields(self) -> Fields:
        """The text field in a choice's last chunk, which has no text."""
        return self._text_fields("")

    @abstractmethod
    def _scores(self, choice: Choice, scored: list[ScoredToken]) -> Fields:
        """The field `logprobs` of drawn tokens."""

    def _ending(self, choice: Choice) -> Fields:
        ending = {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        return ending | _version_fields(choice.weight_versions) if self._head.weight_versions else ending

    def _ids_fields(self, choice_delta: ChoiceDelta) -> Fields:
        """The field `token_ids` of a whole choice, null unless the request asks for it, and `sampled_logprobs` if the
        request asks for these."""
        return {"token_ids": None, **self._asked_fields(choice_delta)}

    def _asked_fields(self, choice_delta: ChoiceDelta) -> Fields:
        """The lists with an entry for each new token that the request asks for."""
        fields: Fields = {}
        if self._head.token_ids:
            fields["token_ids"] = list_of(choice_delta.token_ids, len(choice_delta.token_ids))
        if self._by_id:
            of_token = partial(scores_by_id, self._tokenizer, num_top=self._num_top, ranked=not self._head.asked_ids)
            entries = (of_token(token.token_id, token.scores) for token in choice_delta.scored if token.scores)
            fields["logprobs_by_id"] = list_of(entries, len(choice_delta.scored))
        if self._head.sampled_logprobs:
            fields["sampled_logprobs"] = list_of(
                map(finite, choice_delta.sampled_logprobs), len(choice_delta.sampled_logprobs)
            )
        return fields

    def _prompt_ids(self, prompt: Sequence[int]) -> Fields:
        """The ids of the prompt's tokens, null unless the request asks for them."""
        return {"prompt_token_ids": list_of(prompt, len(prompt)) if self._head.token_ids else None}

    def _whole_fields(self) -> Fields:
        """Additional fields of the whole answer."""
        return {}

    # the frame around it

    def whole(self) -> Fields:
        choices = self._generation.choices
        body = self._object(self.WHOLE, NestedList(self._whole_choice(choice, choice.take()) for choice in choices))
        return body | {"usage": self._usage(choices, self._head.n)} | self._whole_fields()

    def opening(self, choice: Choice) -> Iterable[bytes]:
        return ()

    def gained(self, choice: Choice, choice_delta: ChoiceDelta) -> Iterable[bytes]:
        ends = self._ends_in_gain(choice)
        if not (
            choice_delta.pieces or choice_delta.scored or ends or (self._moves_without_text and choice_delta.token_ids)
        ):
            return ()
        if self._plain and choice_delta.is_content:
            return map(self._template(choice).fill, [choice_delta.text])
        chunks = [self._chunk(choice, fields) for fields in self._delta_fields(choice_delta)]
        first, last = chunks[0]["choices"][0], chunks[-1]["choices"][0]
        if self._scores_shown:
            first["logprobs"] = self._scores(choice, choice_delta.scored)
        first |= self._asked_fields(choice_delta)
        if ends:
            last |= self._ending(choice)
        return chain.from_iterable(map(event_pieces, chunks))

    def ending(self, choice: Choice) -> Iterable[bytes]:
        if self._ends_in_gain(choice):
            return ()
        chunk = self._chunk(choice, self._end_fields())
        chunk["choices"][0] |= self._ending(choice)
        return [event(encode_json(chunk))]

    def last(self) -> bytes:
        if not self._head.usage.in_stream:
            return DONE
        counts = self._usage(self._generation.choices, self._head.n)
        return event(encode_json(self._object(self.CHUNK, []) | {"usage": counts})) + DONE

    def failed(self, error: RequestError) -> bytes:
        return event(error.encode()) + DONE

    @property
    def _moves_without_text(self) -> bool:
        """Whether a token without text, or with text that is held back, gets a chunk."""
        head = self._head
        return head.every_token or head.token_ids or head.sampled_logprobs or head.usage.in_every_chunk

    def _ends_in_gain(self, choice: Choice) -> bool:
        """Whether the chunk with a choice's last output also has the finish reason. This is so if every chunk shows
        more than text: a separate last chunk would repeat the usage, and have no log-probabilities or token ids."""
        return not self._plain and choice.finish_reason is not None

    def _template(self, choice: Choice) -> ChunkTemplate:
        if choice.index not in self._templates:
            chunk = self._chunk(choice, self._text_fields(ChunkTemplate.HOLE))
            self._templates[choice.index] = ChunkTemplate(chunk)
        return self._templates[choice.index]

    def _chunk(self, choice: Choice, fields: Fields, *, opens: bool = False) -> Fields:
        """A chunk with one choice. With `opens` it comes before the choice's first token."""
        part = {"index": choice.index, **fields, "logprobs": None, "finish_reason": None}
        chunk = self._object(self.CHUNK, [part])
        if self._head.usage.in_stream:
            in_every_chunk = self._head.usage.in_every_chunk
            chunk["usage"] = self._usage([choice], 1, no_output=opens) if in_every_chunk else None
        return chunk

    def _object(self, kind: str, choices: list[Fields] | NestedList) -> Fields:
        head = self._head
        return {"id": head.id, "object": kind, "created": head.created, "model": head.model, "choices": choices}

    def _usage(self, choices: list[Choice], n: int, *, no_output: bool = False) -> Fields:
        """The `usage` object of OpenAI. A prompt with `n` choices counts once. With `no_output` no token of output
        counts."""
        options, hidden = self._head.usage, self._hidden_tokens
        prompt = sum(choice.num_prompt_tokens for choice in choices[::n])
        completion = 0 if no_output else sum(max(0, choice.num_tokens - hidden) for choice in choices)
        counts: Fields = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        if options.show_cached:
            counts["prompt_tokens_details"] = {"cached_tokens": sum(c.num_cached_tokens for c in choices[::n])}
        details = {}
        if reasoning := sum(choice.num_reasoning_tokens for choice in choices):
            details["reasoning_tokens"] = reasoning
        if options.show_drafts:
            accepted, rejected = (sum(choice.drafts[i] for choice in choices) for i in (0, 1))
            details |= {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
        return counts | ({"completion_tokens_details": details} if details else {})


def _version_fields(runs: Sequence[tuple[str, int]]) -> Fields:
    """The version of the weights of the last token, and vLLM's spans of tokens, each of one version."""
    spans, end = [], 0
    for version, num_tokens in runs:
        if num_tokens:
            spans.append({"version": version, "start": end, "end": end + num_tokens})
        end += num_tokens
    return {"weight_version": spans[-1]["version"] if spans else runs[-1][0], "weight_versions": spans}
