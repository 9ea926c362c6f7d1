"""From a request's sampling fields to the engine's SamplingParams: defaults, ranges, and what contradicts what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from batcher.request import MAX_LOGIT_BIAS, MAX_LOGPROBS, SamplingParams
from server.api.schemas import SamplingFields
from server.http.errors import RequestError, invalid
from server.ranges import LEAST_TOP_K, MIN_PS, REPETITION_PENALTIES, TEMPERATURES, TOP_PS
from server.settings import GenerationDefaults

GREEDY_BELOW = 1e-5  # a lower temperature is greedy: dividing by it would overflow, and no draw would differ
MAX_STOP_STRINGS = 32
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
SEED_BITS = 63
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


def check_sampling(body: SamplingFields, *, vocab_size: int) -> None:
    """Raises RequestError 400 for the first value that is out of range. Lengths come once the prompt is known."""
    _check_range("temperature", body.temperature, *TEMPERATURES)
    _check_range("top_p", body.top_p, *TOP_PS, low_open=True)
    _check_range("min_p", body.min_p, *MIN_PS)
    _check_range("presence_penalty", body.presence_penalty, -2, 2)
    _check_range("frequency_penalty", body.frequency_penalty, -2, 2)
    _check_range("repetition_penalty", body.repetition_penalty, *REPETITION_PENALTIES)
    if body.top_k is not None and body.top_k < LEAST_TOP_K:
        raise invalid("top_k", f"must be -1 or 0 (off) or positive, got {body.top_k}")
    if body.n is not None and body.n < 1:
        raise invalid("n", f"must be at least 1, got {body.n}")
    if body.min_tokens is not None and body.min_tokens < 0:
        raise invalid("min_tokens", f"must not be negative, got {body.min_tokens}")
    if body.priority is not None and abs(body.priority) > 2**31:
        raise invalid("priority", f"must fit in 32 bits, got {body.priority}")
    _check_seed(body.seed)
    _check_stops(body.stop)
    if len(body.stop_token_ids or []) > MAX_STOP_TOKEN_IDS:
        raise invalid("stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} are allowed, got {len(body.stop_token_ids)}")
    check_ids("stop_token_ids", body.stop_token_ids or [], vocab_size)
    parse_logit_bias(body.logit_bias, vocab_size)


def stop_strings(body: SamplingFields) -> tuple[str, ...]:
    if body.stop is None:
        return ()
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)


def sampling_params(
    body: SamplingFields,
    defaults: GenerationDefaults,
    *,
    max_tokens: int,
    vocab_size: int,
    choice: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """The parameters of choice number `choice` of a body that `check_sampling` has passed.

    With a seed each choice gets its own, one after the other, so that they differ and can be had again.
    """
    temperature = _or(body.temperature, defaults.temperature)
    seed = None if body.seed in (None, -1) else (body.seed + choice) % 2**SEED_BITS
    top_k = max(0, _or(body.top_k, defaults.top_k))
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens or 0,
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_k=0 if top_k >= vocab_size else top_k,
        top_p=_or(body.top_p, defaults.top_p),
        min_p=_or(body.min_p, defaults.min_p),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=_or(body.repetition_penalty, defaults.repetition_penalty),
        logit_bias=parse_logit_bias(body.logit_bias, vocab_size),
        seed=seed,
        stop_token_ids=tuple(dict.fromkeys(body.stop_token_ids or ())),
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def check_top_logprobs(param: str, value: int) -> None:
    if not 0 <= value <= MAX_LOGPROBS:
        raise invalid(param, f"must be between 0 and {MAX_LOGPROBS}, got {value}")


def parse_logit_bias(bias: dict[str, float] | None, vocab_size: int) -> tuple[tuple[int, float], ...]:
    if len(bias or {}) > MAX_LOGIT_BIAS:
        raise invalid("logit_bias", f"at most {MAX_LOGIT_BIAS} tokens are allowed, got {len(bias)}")
    pairs: dict[int, float] = {}
    for key, value in (bias or {}).items():
        if not key.isascii() or not key.isdigit() or len(key) > 9 or int(key) >= vocab_size:
            raise invalid("logit_bias", f"a key must be a token id below {vocab_size}, got {key[:40]!r}")
        if not -100 <= value <= 100:
            raise invalid("logit_bias", f"a bias must be between -100 and 100, got {value} for token {key}")
        pairs[int(key)] = value
    return tuple(pairs.items())


def check_ids(param: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raises RequestError 400 where one of them is no token's."""
    for id in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= id < vocab_size:
            raise invalid(param, f"a token id must be between 0 and {vocab_size - 1}, got {id}")


def _check_seed(seed: int | None) -> None:
    if seed is None:
        return
    for bound, relation, broken in (
        (INT64_MIN, "greater_than_equal", seed < INT64_MIN),
        (INT64_MAX, "less_than_equal", seed > INT64_MAX),
    ):
        if broken:
            raise invalid("seed", f"must be {relation} {bound}, got {seed}")


def _check_stops(stop: str | list[str] | None) -> None:
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > MAX_STOP_STRINGS:
        raise invalid("stop", f"at most {MAX_STOP_STRINGS} stop strings are allowed, got {len(stops)}")
    for text in stops:
        if not text:
            raise invalid("stop", "a stop string must not be empty")
        if len(text) > MAX_STOP_CHARS:
            raise invalid("stop", f"a stop string has at most {MAX_STOP_CHARS} characters, got {len(text)}")


def _check_range(name: str, value: float | None, low: float, high: float, *, low_open: bool = False) -> None:
    if value is None:
        return
    above = value > low if low_open else value >= low
    if not (above and value <= high):  # NaN is neither
        interval = f"{'(' if low_open else '['}{low}, {high}]"
        raise RequestError(400, f"{name}: must be in {interval}, got {value}", param=name)


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
