"""Checks that prompts and outputs fit: the model's context, the output limits, and the number of log-probabilities.

Each log-probability takes about eighty bytes of the answer. Each output token of each choice counts `logprobs` (or
`top_logprobs`) + 1, and one more with `sampled_logprobs`. Prompt tokens count in the same way if `prompt_logprobs`, or
`echo` with `logprobs`, is given. A request without `max_tokens` is not refused because of its output. The output then
ends at the limit, as with a full context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from server.api.request.schemas import Side
from server.http.request_error import RequestError, given, invalid, too_long
from server.text.tokenizer import ByteLevelTokenizer

Given = str | Sequence[str | int | list[int]] | None


def listed(param: str, value: Given) -> list[str | list[int]]:
    """The value as a list of texts and lists of ids. Raises RequestError 400 if it is missing or empty.

    `check_kinds` checks that all items are of one kind.
    """
    value = given(param, value)
    if isinstance(value, str):
        return [value]
    if not value:
        raise invalid(param, "must not be an empty list")
    return cast("list[str | list[int]]", [value] if isinstance(value[0], int) else value)


def check_kinds(param: str, value: Given) -> None:
    """Raises RequestError 400 if a list has items of several kinds."""
    if isinstance(value, list) and len(set(map(type, value))) > 1:
        raise invalid(param, "must be a text, a list of texts, a list of token ids or a list of such lists")


def check_text_length(
    num_chars: int, tokenizer: ByteLevelTokenizer, max_model_len: int, *, least_output: int = 1
) -> None:
    """Raises RequestError 400 for a text that cannot fit in any tokenization. Called before the text is encoded."""
    least = -(-num_chars // tokenizer.max_token_chars)
    if least + least_output > max_model_len:
        problem = f"your prompt has {num_chars} characters, which are at least {least} tokens. Please shorten it."
        raise _beyond_context(max_model_len, problem, "input_text")


def check_num_messages(count: int, max_model_len: int) -> None:
    """Raises RequestError 400 for a conversation that would not fit even with one token per message. Called before the
    template is rendered."""
    if count >= max_model_len:
        problem = f"your conversation has {count} messages, of at least a token each. Please shorten it."
        raise _beyond_context(max_model_len, problem, "messages")


def _beyond_context(max_model_len: int, problem: str, param: str) -> RequestError:
    message = f"This model's maximum context length is {max_model_len} tokens. However, {problem}"
    return too_long(message, param)


def kept_part(
    wanted: int | None, side: Side | None, max_model_len: int, *, least_output: int, default: Side = "left"
) -> slice:
    """The part of a prompt that is kept: `wanted` tokens, all of them (None), or as many as fit (-1), so that
    `least_output` tokens of output can follow.

    `side` is the end that is cut. Raises RequestError 400.
    """
    if wanted is None:
        return slice(None)
    if wanted < -1 or wanted == 0:
        raise invalid("truncate_prompt_tokens", f"must be at least 1, or -1 for as many as fit, got {wanted}")
    if wanted > max_model_len:
        message = f"must not be above the context of {max_model_len} tokens, got {wanted}"
        raise invalid("truncate_prompt_tokens", message)
    kept = max(1, max_model_len - least_output) if wanted == -1 else wanted
    return slice(kept) if (side or default) == "right" else slice(-kept, None)


def output_limit(num_prompt: int, asked: int | None, max_model_len: int, *, param: str, most: int | None = None) -> int:
    """The most tokens of output. With `asked` None the output may fill the context. It is at most `most`.

    Raises RequestError 400 if no token fits. A prompt is followed by at least one token, which is hidden if 0 are asked
    for. `param` is the name of the field with `asked`.
    """
    if num_prompt < 1:
        raise RequestError(400, "The prompt is empty.", param="prompt")
    if asked is not None and asked > max_model_len:
        raise too_long(
            f"{param} is too large: {asked}. This model's maximum context length is {max_model_len} tokens, prompt "
            "and output together.",
            param=param,
        )
    wanted = asked or 1
    if num_prompt + wanted > max_model_len:
        total = f"you requested {wanted} output tokens and your prompt contains {num_prompt} tokens, "
        total += f"{num_prompt + wanted} in total. Please shorten the prompt or ask for fewer tokens."
        if not asked:
            total = f"your prompt contains {num_prompt} tokens, and at least one token, hidden or not, follows it. "
            total += "Please shorten the prompt."
        raise _beyond_context(max_model_len, total, "input_tokens")
    limit = max_model_len - num_prompt if asked is None else wanted
    return limit if most is None else min(limit, most)


def limit_scores(
    limits: Sequence[int],
    *,
    n: int,
    logprobs: int | None,
    sampled_logprobs: bool = False,
    num_prompt_scores: int,
    fixed: bool,
    most: int,
) -> list[int]:
    """The prompts' output limits. They are lowered if there would be more than `most` log-probabilities, unless they
    are `fixed` by the request. Raises RequestError 400 if the log-probabilities are still too many."""
    per_token = n * ((0 if logprobs is None else logprobs + 1) + sampled_logprobs)
    num_scores = num_prompt_scores + per_token * sum(limits)
    if num_scores <= most:
        return list(limits)
    room = (most - num_prompt_scores) // (per_token * len(limits)) if per_token else 0
    if fixed or room < 1:
        own = "sampled_logprobs" if logprobs is None else "logprobs"
        raise RequestError(
            400,
            f"The request asks for {num_scores} log-probabilities in all: {num_prompt_scores} of prompt tokens and "
            f"{per_token * sum(limits)} of output tokens, n x max_tokens x (logprobs + 1, and 1 with sampled_logprobs) "
            f"for each prompt. This server allows {most} per request (--max-request-logprobs). Please ask for less of "
            "max_tokens, n, logprobs, top_logprobs, sampled_logprobs, prompt_logprobs or echo.",
            param="prompt_logprobs" if num_prompt_scores > most else own,
        )
    return [min(limit, room) for limit in limits]


def check_min_tokens(min_tokens: int | None, limit: int) -> None:
    """Raises RequestError 400 if `min_tokens` exceeds the tokens that fit."""
    if (min_tokens or 0) > limit:
        message = f"min_tokens: {min_tokens} is more than the {limit} tokens that fit."
        raise RequestError(400, message, param="min_tokens")
