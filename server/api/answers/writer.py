"""The interface of the classes that write answers, and the fields that all parts of an answer share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from server.engine.generation import Choice, ChoiceDelta
from server.http.request_error import RequestError


@dataclass(frozen=True, kw_only=True, slots=True)
class UsageOptions:
    """The usage counts that a stream contains. An answer without streaming always has them."""

    in_stream: bool  # in a separate last chunk
    in_every_chunk: bool
    show_cached: bool  # prompt_tokens_details
    show_drafts: bool  # completion_tokens_details


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerHead:
    """The fields that the whole answer, or all of its chunks, have in common."""

    id: str
    model: str
    created: int  # seconds since 1970
    n: int  # choices of each prompt
    usage: UsageOptions
    deadline: float | None = None  # monotonic clock; a waiting request is then refused, and a running one ends
    every_token: bool = False  # whether a token without text also has a chunk
    token_ids: bool = False  # whether the ids of the prompt and of the output are shown
    sampled_logprobs: bool = False  # whether the log-probabilities of the output's tokens are shown
    names_are_ids: bool = False  # whether log-probabilities name tokens as `token_id:97`
    asked_ids: bool = False  # whether log-probabilities are those of `logprob_token_ids`
    logprobs_by_id: bool = False  # whether `logprobs_by_id`, in the form of `prompt_logprobs`, is shown for `logprobs`
    weight_versions: bool = False  # whether the versions of the weights of each choice's tokens are shown


class Writer(Protocol):
    """Writes the answers of a route. `GenerationAnswer` calls the methods in the order of this class.

    The other methods return pieces of server-sent events. They read the choice at once and may encode later.
    """

    def whole(self) -> Mapping[str, Any]:
        """The JSON object. Called when every choice has finished."""

    def opening(self, choice: Choice) -> Iterable[bytes]:
        """The events before a choice's first delta."""

    def gained(self, choice: Choice, choice_delta: ChoiceDelta) -> Iterable[bytes]:
        """The events for a choice's new output. There may be none."""

    def ending(self, choice: Choice) -> Iterable[bytes]:
        """The events after the last delta of a choice. The choice has a finish reason."""

    def last(self) -> bytes:
        """The end of the stream, when all choices have finished."""

    def failed(self, error: RequestError) -> bytes:
        """The end of a stream after an error."""
