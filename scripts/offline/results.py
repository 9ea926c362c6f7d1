"""The results of `LLM`'s methods, read from the server's answers. The names are vLLM's."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Logprob:
    """The log-probability of a token at one place."""

    logprob: float
    rank: int | None = None  # 1 for the most likely token; None: not known, as of `logprob_token_ids`
    decoded_token: str | None = None


Logprobs = dict[int, Logprob]  # of the token at one place, and of others there, by token id


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One of the answers to a prompt."""

    index: int
    text: str
    token_ids: list[int]  # including the token that ended it
    finish_reason: str | None  # None: it has not finished
    stop_reason: str | int | None
    logprobs: list[Logprobs] | None  # one for each of `token_ids`; None: not requested
    sampled_logprobs: list[float] | None  # one for each of `token_ids`; None: not requested
    tool_calls: list[dict[str, Any]]  # the calls of a chat, in the API's form
    weight_versions: list[tuple[str, int]]  # (version of the weights, number of tokens), in order

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the log-probabilities of `token_ids`; None: they were not requested."""
        if self.logprobs is None:
            return None
        return sum(found[token].logprob for token, found in zip(self.token_ids, self.logprobs, strict=True))

    def finished(self) -> bool:
        """Whether no token follows."""
        return self.finish_reason is not None


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """The answers to one prompt."""

    request_id: str
    prompt: str | None  # None: it was given as ids or as a conversation
    prompt_token_ids: list[int]
    prompt_logprobs: list[Logprobs | None] | None  # of all tokens but the first; None: not requested
    outputs: list[CompletionOutput]  # `n` of them
    num_cached_tokens: int  # tokens of the prompt that came from the prefix cache
    finished: bool = True
    metrics: None = None  # `LLM.get_metrics` has the times of all requests


@dataclass(frozen=True, kw_only=True)
class PoolingOutput:
    """A vector of length 1."""

    data: np.ndarray  # f32[D]

    @property
    def embedding(self) -> list[float]:
        """The numbers of the vector."""
        numbers: list[float] = self.data.tolist()
        return numbers


@dataclass(frozen=True, kw_only=True)
class ScoringOutput:
    """The cosine of two vectors."""

    score: float


@dataclass(frozen=True, kw_only=True)
class PoolingRequestOutput:
    """The vector of one prompt, or the score of two."""

    request_id: str
    outputs: Any  # `PoolingOutput`, or `ScoringOutput`
    prompt_token_ids: list[int]  # of a score, those of both prompts
    num_cached_tokens: int  # tokens of the prompt that came from the prefix cache
    finished: bool = True


def scored(query: PoolingRequestOutput, other: PoolingRequestOutput) -> PoolingRequestOutput:
    """The score of two vectors."""
    return PoolingRequestOutput(
        request_id=other.request_id,
        outputs=ScoringOutput(score=float(query.outputs.data @ other.outputs.data)),
        prompt_token_ids=query.prompt_token_ids + other.prompt_token_ids,
        num_cached_tokens=query.num_cached_tokens + other.num_cached_tokens,
    )


def request_output(answer: Mapping[str, Any], prompt: str | None = None) -> RequestOutput:
    """Reads the answer of a chat or a completion. The request had one prompt, `return_token_ids` and
    `return_logprobs_by_id`."""
    first = answer["choices"][0]
    told = first if "prompt_token_ids" in first else answer  # of a completion, each choice has its prompt
    return RequestOutput(
        request_id=answer["id"],
        prompt=prompt,
        prompt_token_ids=told["prompt_token_ids"],
        prompt_logprobs=logprobs_of(told["prompt_logprobs"]),
        outputs=list(map(_completion_output, answer["choices"])),
        num_cached_tokens=_num_cached_tokens(answer["usage"]),
    )


def pooled(answer: Mapping[str, Any]) -> PoolingRequestOutput:
    """Reads the answer with one vector in base64."""
    (entry,) = answer["data"]
    return PoolingRequestOutput(
        request_id=answer["id"],
        outputs=PoolingOutput(data=np.frombuffer(base64.b64decode(entry["embedding"]), "<f4").astype(np.float32)),
        prompt_token_ids=entry["prompt_token_ids"],
        num_cached_tokens=_num_cached_tokens(answer["usage"]),
    )


def logprobs_of(places: Sequence[Mapping[str, Any] | None] | None) -> list[Any] | None:
    """The log-probabilities of each place, from objects of `return_logprobs_by_id`."""
    if places is None:
        return None
    return [None if each is None else {int(id): Logprob(**own) for id, own in each.items()} for each in places]


def _completion_output(choice: Mapping[str, Any]) -> CompletionOutput:
    message = choice.get("message", {})
    return CompletionOutput(
        index=choice["index"],
        text=choice["text"] if "text" in choice else message.get("content") or "",
        token_ids=choice["token_ids"],
        finish_reason=choice["finish_reason"],
        stop_reason=choice["stop_reason"],
        logprobs=logprobs_of(choice.get("logprobs_by_id")),
        sampled_logprobs=choice.get("sampled_logprobs"),
        tool_calls=message.get("tool_calls", []),
        weight_versions=[(span["version"], span["end"] - span["start"]) for span in choice["weight_versions"]]
        or [(choice["weight_version"], 0)],
    )


def _num_cached_tokens(usage: Mapping[str, Any]) -> int:
    found: int = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    return found
