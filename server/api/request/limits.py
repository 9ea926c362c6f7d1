"""Checks that a prompt and its output fit into the model's context, and computes the output limit."""

from __future__ import annotations

from server.http.errors import RequestError, invalid, too_long
from server.text.tokenizer import Tokenizer


def check_text_length(num_chars: int, tokenizer: Tokenizer, max_model_len: int) -> None:
    """Refuses a text that cannot fit in any tokenization, before it is encoded."""
    least = -(-num_chars // tokenizer.max_token_chars)
    if least >= max_model_len:
        raise too_long(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt has {num_chars} "
            f"characters, which are at least {least} tokens. Please shorten it.",
            param="input_text",
        )


def check_num_messages(count: int, max_model_len: int) -> None:
    """Refuses a conversation that would not fit even with one token per message, before the template is rendered."""
    if count >= max_model_len:
        raise too_long(
            f"This model's maximum context length is {max_model_len} tokens. However, your conversation has {count} "
            "messages, of at least a token each. Please shorten it.",
            param="messages",
        )


def truncation(
    wanted: int | None, side: str | None, *, default_side: str = "left", max_model_len: int, least_output: int
) -> slice:
    """The part of a prompt that is kept: `prompt[truncation(...)]`. `side` is the end that is cut.

    `wanted` is the number of tokens. None keeps all; -1 keeps as many as fit, with room for `least_output` tokens of
    output. Raises RequestError 400.
    """
    if side not in (None, "left", "right"):
        raise invalid("truncation_side", f"must be left or right, got {side[:40]!r}")
    if wanted is None:
        return slice(None)
    if wanted < -1 or wanted == 0:
        raise invalid("truncate_prompt_tokens", f"must be at least 1, or -1 for as many as fit, got {wanted}")
    if wanted > max_model_len:
        raise invalid(
            "truncate_prompt_tokens", f"must not be above the context of {max_model_len} tokens, got {wanted}"
        )
    kept = max(1, max_model_len - least_output) if wanted == -1 else wanted
    return slice(kept) if (side or default_side) == "right" else slice(-kept, None)


def output_limit(num_prompt: int, asked: int | None, max_model_len: int, *, param: str) -> int:
    """The most tokens of output; `asked` None fills the context. Raises RequestError 400 if none fits.

    `param` is the name of the field with `asked`.
    """
    if num_prompt < 1:
        raise RequestError(400, "The prompt is empty.", param="prompt")
    if asked is not None and asked > max_model_len:
        raise too_long(
            f"{param} is too large: {asked}. This model's maximum context length is {max_model_len} tokens, prompt "
            "and output together.",
            param=param,
        )
    wanted = 1 if asked is None else asked
    if num_prompt + wanted > max_model_len:
        raise too_long(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested {wanted} output "
            f"tokens and your prompt contains {num_prompt} tokens, {num_prompt + wanted} in total. Please shorten the "
            "prompt or ask for fewer tokens.",
            param="input_tokens",
        )
    return max_model_len - num_prompt if asked is None else asked


def check_counts(max_tokens: int | None, min_tokens: int | None, *, param: str, least: int = 1) -> None:
    """Raises RequestError 400 if the numbers of tokens are too small or contradict each other."""
    if max_tokens is not None and max_tokens < least:
        raise invalid(param, f"must be at least {least}, got {max_tokens}")
    if max_tokens is not None and min_tokens is not None and min_tokens > max_tokens:
        raise invalid("min_tokens", f"must not be greater than {param}, {min_tokens} > {max_tokens}")
