"""Turns a client's request into the engine's record of it, or refuses it and names the invalid field."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from batcher.errors import InvalidRequestError
from batcher.grammar import Matcher, num_mask_words
from batcher.request import MAX_DEVICE_STOP_IDS, MAX_LOGIT_BIAS, MAX_LOGPROB_TOKEN_IDS, Request, SamplingParams
from batcher.requests.bad_words import BadWords, without
from batcher.sampling_table import PARAMETERS
from batcher.scheduling.request_state import OnOutput, RequestState
from batcher.step import Capacity

_RANGES = [(name, parameter.range) for name, parameter in PARAMETERS.items() if parameter.range is not None]


def make_request_state(
    request: Request,
    on_output: OnOutput,
    *,
    capacity: Capacity,
    eos_token_ids: tuple[int, ...],
    seed: int,
    arrived_s: float,
    matcher: Matcher | None = None,
) -> RequestState:
    """The engine's record of a valid request. Raises InvalidRequestError for any other.

    `prompt + max_tokens` may exceed the context: generation then ends there with LENGTH.
    """
    s = request.sampling
    prompt = _token_ids("prompt", request.prompt, capacity.vocab_size)
    if not len(prompt):
        raise InvalidRequestError("prompt", "the prompt is empty")
    least_output = 0 if request.embeds else 1
    if len(prompt) + least_output > capacity.max_model_len:
        raise InvalidRequestError(
            "prompt",
            f"this model's maximum context length is {capacity.max_model_len} tokens, with {least_output} of output; "
            f"the prompt has {len(prompt)}",
        )
    _check_ranges(s)
    if s.min_tokens > s.max_tokens:
        raise InvalidRequestError("min_tokens", f"min_tokens must not be above max_tokens, not {s.min_tokens}")
    _token_ids("stop_token_ids", s.stop_token_ids, capacity.vocab_size)
    # A grammar allows an end-of-sequence token only at its end, so the token always ends the request.
    goes_on = s.ignore_eos and s.grammar is None
    stop_ids = frozenset(s.stop_token_ids if goes_on else (*s.stop_token_ids, *eos_token_ids))
    if s.min_tokens and len(stop_ids) > MAX_DEVICE_STOP_IDS:
        raise InvalidRequestError(
            "stop_token_ids",
            f"with min_tokens, at most {MAX_DEVICE_STOP_IDS} stop ids including end-of-sequence ids, "
            f"not {len(stop_ids)}",
        )
    allowed = _allowed(s, capacity.vocab_size, never_last=stop_ids if s.min_tokens else ())
    words = [word for word in s.bad_words if len(word) > 1]
    if words:
        matcher = BadWords(words, _packed(np.arange(capacity.vocab_size), capacity.vocab_size), matcher)
    bias_ids = _token_ids("logit_bias", [token for token, _ in s.logit_bias], capacity.vocab_size)
    if len(bias_ids) > MAX_LOGIT_BIAS or len(set(bias_ids.tolist())) != len(bias_ids):
        raise InvalidRequestError("logit_bias", f"at most {MAX_LOGIT_BIAS} different tokens, not {len(bias_ids)}")
    if len(_token_ids("logprob_token_ids", s.logprob_token_ids, capacity.vocab_size)) > MAX_LOGPROB_TOKEN_IDS:
        raise InvalidRequestError("logprob_token_ids", f"at most {MAX_LOGPROB_TOKEN_IDS} token ids")
    if not -(2**127) <= request.cache_salt < 2**127:
        raise InvalidRequestError("cache_salt", f"cache_salt must fit in 128 bits, not {request.cache_salt}")
    if request.adapter and not capacity.max_loras:
        raise InvalidRequestError("adapter", "this engine runs no LoRA adapters: it was started without --enable-lora")
    if request.model and not capacity.max_models:
        raise InvalidRequestError("model", "this engine has one model only: it was started without --models")
    if request.embeds and capacity.pooling is None:
        raise InvalidRequestError("embeds", "this engine makes no embeddings")
    return RequestState(
        request,
        prompt,
        limit=1 if request.embeds else min(s.max_tokens, capacity.max_model_len - len(prompt)),
        stop_ids=stop_ids,
        seed=seed if s.seed is None else s.seed,
        arrived_s=arrived_s,
        on_output=on_output,
        matcher=matcher,
        allowed=allowed,
        pooling=capacity.pooling if request.embeds else None,
    )


def _token_ids(name: str, ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """i32[n]. Raises InvalidRequestError if one is not a token of the model."""
    try:
        if not len(ids):
            return np.empty(0, np.int32)
        array = np.array(ids)
    except (OverflowError, ValueError, TypeError) as error:
        raise InvalidRequestError(name, f"{name} must be token ids: {error}") from error
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidRequestError(name, f"{name} must be a flat list of token ids, integers")
    wrong = (array < 0) | (array >= vocab_size)
    if wrong.any():
        at = int(wrong.argmax())
        raise InvalidRequestError(
            name, f"{name} has a token id out of range at index {at}: {int(array[at])} is not in [0, {vocab_size})"
        )
    return array.astype(np.int32, copy=False)


def _allowed(s: SamplingParams, vocab_size: int, *, never_last: Collection[int]) -> np.ndarray | None:
    """The constant mask of a request, i32[num_mask_words]: the tokens that it may draw at any position. None: all.

    Raises InvalidRequestError if no token is left, or, before `min_tokens`, none but stop ids.
    """
    for word in s.bad_words:
        if not len(_token_ids("bad_words", word, vocab_size)):
            raise InvalidRequestError("bad_words", "a word must have at least one token id")
    barred = [word[0] for word in s.bad_words if len(word) == 1]
    if s.allowed_token_ids is None and not barred:
        return None
    if s.allowed_token_ids is None:
        name, tokens = "bad_words", np.arange(vocab_size)
    else:
        name, tokens = "allowed_token_ids", _token_ids("allowed_token_ids", s.allowed_token_ids, vocab_size)
        if not len(tokens):
            raise InvalidRequestError(name, f"{name} must have at least one token id")
    allowed = without(_packed(tokens, vocab_size), barred)
    if not allowed.any():
        raise InvalidRequestError(name, "at least one token that is not a bad word must be allowed")
    if never_last and not without(allowed, list(never_last)).any():
        raise InvalidRequestError(name, "with min_tokens, one that is no stop id must be allowed")
    return allowed


def _packed(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """The mask of these tokens, i32[num_mask_words]."""
    bits = np.zeros(num_mask_words(vocab_size) * 32, np.uint8)
    bits[tokens] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _check_ranges(sampling: SamplingParams) -> None:
    """Numbers within their ranges are finite in float32, the device's type, and no logit is divided by zero."""
    for name, interval in _RANGES:
        value = getattr(sampling, name)
        if value is None:
            continue
        for number in [bias for _, bias in value] if name == "logit_bias" else (value,):
            if number not in interval:
                raise InvalidRequestError(name, f"{name} must be {interval}, not {number}")
