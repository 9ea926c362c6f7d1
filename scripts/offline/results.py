"""The results of `LLM`'s methods, read from the server's answers. The names are vLLM's."""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One of the answers to a prompt."""

    index: int
    text: str
    token_ids: tuple[int, ...]  # including the token that ended it
    finish_reason: str | None  # None: it has not finished
    stop_reason: str | int | None
    logprobs: dict[str, Any] | None  # in the API's form
    sampled_logprobs: tuple[float, ...] | None  # one for each of `token_ids`; None: not requested
    tool_calls: tuple[dict[str, Any], ...]  # the calls of a chat, in the API's form
    weight_versions: tuple[tuple[str, int], ...]  # (version of the weights, number of tokens), in order

    @property
    def weight_version(self) -> str:
        """The version of the weights of the last token; without tokens, of the weights at the end."""
        return self.weight_versions[-1][0]


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """The answers to one prompt."""

    request_id: str
    prompt: str | None  # None: it was given as ids or as a conversation
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: list[Any] | None  # in the API's form
    outputs: tuple[CompletionOutput, ...]  # `n` of them
    num_cached_tokens: int  # tokens of the prompt that came from the prefix cache
    finished: bool = True

    @property
    def num_prompt_tokens(self) -> int:
        """The length of `prompt_token_ids`."""
        return len(self.prompt_token_ids)

    @property
    def text(self) -> str:
        """The text of the first output."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The token ids of the first output."""
        return self.outputs[0].token_ids

    @property
    def tool_calls(self) -> tuple[dict[str, Any], ...]:
        """The tool calls of the first output."""
        return self.outputs[0].tool_calls


@dataclass(frozen=True, kw_only=True)
class Embedding:
    """The vector of one prompt."""

    vector: array[float]  # f32[D], of length 1
    num_prompt_tokens: int
    num_cached_tokens: int  # tokens of the prompt that came from the prefix cache


def request_output(answer: Mapping[str, Any], prompt: str | None = None) -> RequestOutput:
    """Reads the answer of a chat, a completion or token ids. The request had one prompt and `return_token_ids`."""
    first = answer["choices"][0]
    told = first if "prompt_token_ids" in first else answer  # of a completion, each choice has its prompt
    return RequestOutput(
        request_id=answer["id"] if "id" in answer else answer["request_id"],
        prompt=prompt,
        prompt_token_ids=tuple(told["prompt_token_ids"]),
        prompt_logprobs=told["prompt_logprobs"],
        outputs=tuple(map(_completion_output, answer["choices"])),
        num_cached_tokens=_num_cached_tokens(answer["usage"]),
    )


def embedding(answer: Mapping[str, Any]) -> Embedding:
    """Reads the answer with one vector in base64."""
    (entry,), usage = answer["data"], answer["usage"]
    vector = array("f", base64.b64decode(entry["embedding"]))
    if sys.byteorder == "big":
        vector.byteswap()
    return Embedding(
        vector=vector, num_prompt_tokens=usage["prompt_tokens"], num_cached_tokens=_num_cached_tokens(usage)
    )


def _completion_output(choice: Mapping[str, Any]) -> CompletionOutput:
    message, sampled = choice.get("message", {}), choice.get("sampled_logprobs")
    return CompletionOutput(
        index=choice["index"],
        text=choice["text"] if "text" in choice else message.get("content") or "",
        token_ids=tuple(choice["token_ids"]),
        finish_reason=choice["finish_reason"],
        stop_reason=choice["stop_reason"],
        logprobs=choice["logprobs"],
        sampled_logprobs=None if sampled is None else tuple(sampled),
        tool_calls=tuple(message.get("tool_calls", ())),
        weight_versions=tuple((span["version"], span["end"] - span["start"]) for span in choice["weight_versions"])
        or ((choice["weight_version"], 0),),
    )


def _num_cached_tokens(usage: Mapping[str, Any]) -> int:
    found: int = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    return found
