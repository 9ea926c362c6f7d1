"""A client's request becomes the engine's record of it, or is refused with the field at fault named."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from batcher.errors import InvalidRequestError
from batcher.request import MAX_DEVICE_STOP_IDS, MAX_LOGIT_BIAS, MAX_LOGPROBS, Request
from batcher.sequence import OnOutput, Sequence
from batcher.step import Capacity

_LARGEST = float(np.finfo(np.float32).max)
_SMALLEST = float(np.finfo(np.float32).smallest_normal)  # below it some chips read zero


def make_sequence(
    request: Request,
    on_output: OnOutput,
    *,
    capacity: Capacity,
    eos_token_ids: tuple[int, ...],
    seed: int,
    arrived_s: float,
) -> Sequence:
    """Raises InvalidRequestError for what could never run, or would do harm on the device.

    `prompt + max_tokens` may exceed the context: generation then ends there with LENGTH.
    """
    s = request.sampling
    prompt = _token_ids("prompt", request.prompt, capacity.vocab_size)
    if not len(prompt):
        raise InvalidRequestError("prompt", "the prompt is empty")
    if len(prompt) >= capacity.max_model_len:
        raise InvalidRequestError(
            "prompt",
            f"this model's maximum context length is {capacity.max_model_len} tokens, of which one is left for "
            f"output; the prompt has {len(prompt)}",
        )
    if s.max_tokens < 1:
        raise InvalidRequestError("max_tokens", f"max_tokens must be at least 1, not {s.max_tokens}")
    if not 0 <= s.min_tokens <= s.max_tokens:
        raise InvalidRequestError("min_tokens", f"min_tokens must be between 0 and max_tokens, not {s.min_tokens}")
    _token_ids("stop_token_ids", s.stop_token_ids, capacity.vocab_size)
    stop_ids = frozenset(s.stop_token_ids if s.ignore_eos else (*s.stop_token_ids, *eos_token_ids))
    if s.min_tokens and len(stop_ids) > MAX_DEVICE_STOP_IDS:
        raise InvalidRequestError(
            "stop_token_ids",
            f"with min_tokens, at most {MAX_DEVICE_STOP_IDS} stop ids including end-of-sequence ids, "
            f"not {len(stop_ids)}",
        )
    bias_ids = _token_ids("logit_bias", [token for token, _ in s.logit_bias], capacity.vocab_size)
    if len(bias_ids) > MAX_LOGIT_BIAS or len(set(bias_ids.tolist())) != len(bias_ids):
        raise InvalidRequestError("logit_bias", f"at most {MAX_LOGIT_BIAS} different tokens, not {len(bias_ids)}")
    for name, count in (("logprobs", s.logprobs), ("prompt_logprobs", s.prompt_logprobs)):
        if count is not None and not 0 <= count <= MAX_LOGPROBS:
            raise InvalidRequestError(name, f"{name} must be between 0 and {MAX_LOGPROBS}, not {count}")
    if s.top_k < 0:
        raise InvalidRequestError("top_k", f"top_k must not be negative, not {s.top_k}")
    _check_numbers(request)
    return Sequence(
        request,
        prompt,
        limit=min(s.max_tokens, capacity.max_model_len - len(prompt)),
        stop_ids=stop_ids,
        seed=seed if s.seed is None else s.seed,
        arrived_s=arrived_s,
        on_output=on_output,
    )


def _token_ids(name: str, ids: Seq[int], vocab_size: int) -> np.ndarray:
    """i32[n]. InvalidRequestError where one is not a token of the model."""
    try:
        array = np.array(ids if len(ids) else np.empty(0, np.int64))
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
    return array.astype(np.int32)


def _check_numbers(request: Request) -> None:
    """Floats travel to the device as float32: there they must be finite, and what divides must not be zero."""
    s = request.sampling
    numbers = {
        "temperature": s.temperature,
        "top_p": s.top_p,
        "min_p": s.min_p,
        "presence_penalty": s.presence_penalty,
        "frequency_penalty": s.frequency_penalty,
        "repetition_penalty": s.repetition_penalty,
    }
    for name, number in numbers.items():
        if not abs(number) <= _LARGEST:  # NaN is not either
            raise InvalidRequestError(name, f"{name} must be a finite number in float32, not {number}")
    if not all(abs(bias) <= _LARGEST for _, bias in s.logit_bias):
        raise InvalidRequestError("logit_bias", "biases must be finite numbers in float32")
    if s.temperature < 0:
        raise InvalidRequestError("temperature", f"temperature must not be negative, not {s.temperature}")
    if s.min_p > 1:
        raise InvalidRequestError("min_p", f"min_p must not be above 1, where no token is left, not {s.min_p}")
    if s.repetition_penalty < _SMALLEST:
        raise InvalidRequestError(
            "repetition_penalty", f"must be positive, at least {_SMALLEST} in float32, not {s.repetition_penalty}"
        )
    if not -(2**127) <= request.cache_salt < 2**127:
        raise InvalidRequestError("cache_salt", f"cache_salt must fit in 128 bits, not {request.cache_salt}")
