"""From a request's sampling fields to the engine's SamplingParams: defaults, ranges and contradictions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from batcher.request import MAX_LOGIT_BIAS, MAX_LOGPROBS, SamplingParams
from batcher.sampling_table import PARAMETERS
from server.api.request.schemas import SamplingFields
from server.http.errors import invalid
from server.settings import TOP_K_OFF, GenerationDefaults

GREEDY_BELOW = 1e-5  # a lower temperature is greedy: dividing by it would overflow, and no draw would differ
MAX_STOP_CHARS = 1024
SEED_BITS = 63
# the routes spell these differently
READ_BY_ROUTES = {"max_tokens", "logprobs", "prompt_logprobs", "grammar", "bad_words", "allowed_token_ids"}
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


def check_sampling(body: SamplingFields, *, vocab_size: int) -> None:
    """Raises RequestError 400 for the first value that is out of range. Lengths are checked with the prompt."""
    for name, parameter in PARAMETERS.items():
        value = None if name in READ_BY_ROUTES else getattr(body, name)
        if parameter.range is None or not isinstance(value, int | float):
            continue
        if value not in parameter.range and not (name == "top_k" and value == TOP_K_OFF):
            raise invalid(name, f"must be {parameter.range}, got {value}")
    if body.n is not None and body.n < 1:
        raise invalid("n", f"must be at least 1, got {body.n}")
    check_priority(body.priority)
    _check_seed(body.seed)
    _check_stops(body.stop)
    check_ids("stop_token_ids", body.stop_token_ids or (), vocab_size)
    parse_logit_bias(body.logit_bias, vocab_size)
    if body.allowed_token_ids is not None:
        if not body.allowed_token_ids:
            raise invalid("allowed_token_ids", "must have at least one token id")
        if len(body.allowed_token_ids) > vocab_size:
            raise invalid("allowed_token_ids", f"at most {vocab_size} are allowed, the size of the vocabulary")
        check_ids("allowed_token_ids", body.allowed_token_ids, vocab_size)


def check_priority(priority: int | None) -> None:
    """Raises RequestError 400 where it is out of range."""
    if priority is not None and abs(priority) > 2**31:
        raise invalid("priority", f"must fit in 32 bits, got {priority}")


def stop_strings(body: SamplingFields) -> tuple[str, ...]:
    """A body's `stop` as a tuple."""
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
    grammar: str | None = None,
    bad_words: tuple[tuple[int, ...], ...] = (),
    allowed_token_ids: tuple[int, ...] | None = None,
) -> SamplingParams:
    """The parameters of choice number `choice` of a body that `check_sampling` has passed.

    Choice i of a body with a seed gets the seed + i: choices differ, and a repeated request gives the same ones.
    """
    values: dict[str, Any] = {}
    for name in PARAMETERS.keys() - READ_BY_ROUTES:
        value = _or(getattr(body, name), getattr(defaults, name, None))
        if value is not None:
            values[name] = value
    values |= {"max_tokens": max_tokens, "logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
    values |= {"grammar": grammar, "bad_words": bad_words, "allowed_token_ids": allowed_token_ids}
    values["logit_bias"] = parse_logit_bias(body.logit_bias, vocab_size)
    values["seed"] = None if body.seed in (None, -1) else (body.seed + choice) % 2**SEED_BITS
    values["stop_token_ids"] = tuple(dict.fromkeys(body.stop_token_ids or ()))
    if values["temperature"] < GREEDY_BELOW:
        values["temperature"] = 0.0
    if values["top_k"] >= vocab_size or values["top_k"] == TOP_K_OFF:
        values["top_k"] = 0
    return SamplingParams(**values)


def check_top_logprobs(param: str, value: int) -> None:
    """Raises RequestError 400 if `value` is outside of 0 to MAX_LOGPROBS."""
    if not 0 <= value <= MAX_LOGPROBS:
        raise invalid(param, f"must be between 0 and {MAX_LOGPROBS}, got {value}")


def parse_logit_bias(bias: dict[str, float] | None, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """(token id, bias) pairs. Raises RequestError 400 if there are too many, or one is out of range."""
    bias = bias or {}
    if len(bias) > MAX_LOGIT_BIAS:
        raise invalid("logit_bias", f"at most {MAX_LOGIT_BIAS} tokens are allowed, got {len(bias)}")
    pairs: dict[int, float] = {}
    biases = PARAMETERS["logit_bias"].range
    assert biases is not None
    for key, value in bias.items():
        if not key.isascii() or not key.isdigit() or len(key) > 9 or int(key) >= vocab_size:
            raise invalid("logit_bias", f"a key must be a token id below {vocab_size}, got {key[:40]!r}")
        if value not in biases:
            raise invalid("logit_bias", f"a bias must be {biases}, got {value} for token {key}")
        pairs[int(key)] = value
    return tuple(pairs.items())


def check_ids(param: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raises RequestError 400 if one of the ids is not in the vocabulary."""
    for id in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= id < vocab_size:
            raise invalid(param, f"a token id must be between 0 and {vocab_size - 1}, got {id}")


def _check_seed(seed: int | None) -> None:
    # The words in parentheses are pydantic's names of the constraints, which programs look for.
    if seed is not None and seed < INT64_MIN:
        raise invalid("seed", f"must be at least {INT64_MIN} (greater_than_equal), got {seed}")
    if seed is not None and seed > INT64_MAX:
        raise invalid("seed", f"must be at most {INT64_MAX} (less_than_equal), got {seed}")


def _check_stops(stop: str | list[str] | None) -> None:
    stops = [stop] if isinstance(stop, str) else stop or []
    for text in stops:
        if not text:
            raise invalid("stop", "a stop string must not be empty")
        if len(text) > MAX_STOP_CHARS:
            raise invalid("stop", f"a stop string has at most {MAX_STOP_CHARS} characters, got {len(text)}")


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
