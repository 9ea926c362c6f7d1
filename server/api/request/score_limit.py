"""The limit on log-probabilities per request: each takes about eighty bytes of the answer.

Each output token of each choice counts `logprobs` (or `top_logprobs`) + 1. Prompt tokens count in the same way if
`prompt_logprobs`, or `echo` with `logprobs`, is given. A request without `max_tokens` is not refused for its output:
the output ends at the limit, as with a full context.
"""

from __future__ import annotations

from collections.abc import Sequence

from server.http.errors import RequestError


def limit_scores(
    limits: Sequence[int], *, n: int, logprobs: int | None, num_prompt_scores: int, fixed: bool, most: int
) -> list[int]:
    """The prompts' output limits. They are lowered if there would be more than `most` log-probabilities, unless they
    are `fixed` by the request. Raises RequestError 400 if the log-probabilities are still too many."""
    per_token = 0 if logprobs is None else n * (logprobs + 1)
    num_scores = num_prompt_scores + per_token * sum(limits)
    if num_scores <= most:
        return list(limits)
    room = (most - num_prompt_scores) // (per_token * len(limits)) if per_token else 0
    if fixed or room < 1:
        raise RequestError(
            400,
            f"The request asks for {num_scores} log-probabilities in all: {num_prompt_scores} of prompt tokens and "
            f"{per_token * sum(limits)} of output tokens, n x max_tokens x (logprobs + 1) for each prompt. This server "
            f"allows {most} per request (--max-request-logprobs). Please ask for less of max_tokens, n, logprobs, "
            "top_logprobs, prompt_logprobs or echo.",
            param="prompt_logprobs" if num_prompt_scores > most else "logprobs",
        )
    return [min(limit, room) for limit in limits]
