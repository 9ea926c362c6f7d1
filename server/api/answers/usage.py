"""Token counts as OpenAI reports them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from server.engine.generation import Choice


@dataclass(frozen=True, kw_only=True, slots=True)
class UsageOptions:
    """The counts that a stream contains; an answer that is not streamed always has them."""

    in_stream: bool  # in a separate last chunk
    in_every_chunk: bool
    show_cached: bool  # prompt_tokens_details
    show_drafts: bool  # completion_tokens_details


def usage(
    choices: Iterable[Choice],
    n: int,
    *,
    show_cached: bool,
    show_drafts: bool = False,
    hidden_tokens: int = 0,
    no_output: bool = False,
) -> dict[str, Any]:
    """The `usage` object. A prompt with `n` choices counts once. `hidden_tokens` of each output do not count; with
    `no_output` no token of output counts."""
    choices = list(choices)
    prompt = sum(choice.num_prompt_tokens for choice in choices[::n])
    completion = 0 if no_output else sum(max(0, choice.num_tokens - hidden_tokens) for choice in choices)
    counts: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    if show_cached:
        counts["prompt_tokens_details"] = {"cached_tokens": sum(c.num_cached_tokens for c in choices[::n])}
    details = {}
    if reasoning := sum(choice.num_reasoning_tokens for choice in choices):
        details["reasoning_tokens"] = reasoning
    if show_drafts:
        accepted, rejected = (sum(choice.drafts[i] for choice in choices) for i in (0, 1))
        details |= {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
    if details:
        counts["completion_tokens_details"] = details
    return counts
