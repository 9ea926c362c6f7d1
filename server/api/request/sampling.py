"""Checks a request's sampling fields, and turns them into the engine's SamplingParams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batcher.request import MAX_LOGIT_BIAS, MAX_LOGPROBS, SamplingParams
from batcher.sampling_table import PARAMETERS
from server.api.request.fields import NO_BEST_OF
from server.api.request.schemas import SamplingFields
from server.http.request_error import RequestError, invalid
from server.settings import TOP_K_OFF, GenerationDefaults

GREEDY_BELOW = 1e-5  # a lower temperature is greedy: dividing by it would overflow, and no draw would differ
MAX_STOP_CHARS = 1024
ALL_LOGPROBS = -1  # vLLM's value for all log-probabilities
SEED_BITS = 63
# these depend on the prompt, or the routes spell them differently
LATER = {"max_tokens", "logprobs", "prompt_logprobs", "grammar"}
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

Ids = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """A request's sampling parameters and stop strings."""

    values: Mapping[str, Any]  # the fields of SamplingParams except those of `LATER`
    seed: int | None  # None: the engine draws one
    stops: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool

    def params(self, choice: int, **later: Any) -> SamplingParams:
        """The parameters of choice number `choice`. `later` has the fields of `LATER`.

        Choice i of a request with a seed gets the seed + i. So choices differ, and a repeated request gives the same
        choices.
        """
        seed = None if self.seed is None else (self.seed + choice) % 2**SEED_BITS
        return SamplingParams(**self.values, seed=seed, **later)


def checked_sampling(body: SamplingFields, defaults: GenerationDefaults, *, vocab_size: int) -> Sampling:
    """Reads all sampling fields but `bad_words`, which need the tokenizer. Raises RequestError 400."""
    values: dict[str, Any] = {}
    for name in PARAMETERS.keys() - LATER - {"seed", "bad_words"}:
        given = getattr(body, name)
        _check_range(name, given)
        value = getattr(defaults, name, None) if given is None else given
        if value is not None:
            values[name] = value
    if body.best_of and body.best_of != (body.n or 1):
        raise RequestError(400, f"best_of: {NO_BEST_OF}.", param="best_of", code="unsupported_parameter")
    _check_seed(body.seed)
    check_ids("stop_token_ids", body.stop_token_ids or (), vocab_size)
    check_ids("logprob_token_ids", body.logprob_token_ids or (), vocab_size)
    values["logprob_token_ids"] = tuple(dict.fromkeys(body.logprob_token_ids or ()))
    values["logit_bias"] = parse_logit_bias(body.logit_bias, vocab_size)
    values["stop_token_ids"] = tuple(dict.fromkeys(body.stop_token_ids or ()))
    values["allowed_token_ids"] = _allowed_ids(body.allowed_token_ids, vocab_size)
    if values["temperature"] < GREEDY_BELOW:
        values["temperature"] = 0.0
    if values["top_k"] >= vocab_size or values["top_k"] == TOP_K_OFF:
        values["top_k"] = 0
    return Sampling(
        values=values,
        seed=None if body.seed == -1 else body.seed,
        stops=_stop_strings(body.stop),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
    )


def _check_range(name: str, value: Any) -> None:
    bounds = PARAMETERS[name].range
    if bounds is None or not isinstance(value, int | float):
        return
    if value not in bounds and not (name == "top_k" and value == TOP_K_OFF):
        raise invalid(name, f"must be {bounds}, got {value}")


def _allowed_ids(ids: Sequence[int] | None, vocab_size: int) -> tuple[int, ...] | None:
    if ids is None:
        return None
    if not ids:
        raise invalid("allowed_token_ids", "must have at least one token id")
    if len(ids) > vocab_size:
        raise invalid("allowed_token_ids", f"at most {vocab_size} are allowed, the size of the vocabulary")
    check_ids("allowed_token_ids", ids, vocab_size)
    return tuple(dict.fromkeys(ids))


def check_top_logprobs(param: str, value: int) -> None:
    """Raises RequestError 400 if `value` is outside of 0 to MAX_LOGPROBS."""
    if value == ALL_LOGPROBS:
        message = f"{value} asks for the whole vocabulary, and at most {MAX_LOGPROBS} tokens are told at each place"
        raise invalid(param, message)
    if not 0 <= value <= MAX_LOGPROBS:
        raise invalid(param, f"must be between 0 and {MAX_LOGPROBS}, got {value}")


def num_logprobs(param: str, asked: int | None, ids: Sequence[int] | None) -> int | None:
    """The number of tokens whose log-probabilities are reported with each token; None: none are. Raises RequestError
    400. `param` is the name of the field with `asked`, and `ids` are `logprob_token_ids`."""
    if ids:
        if asked not in (None, len(ids)):
            raise invalid(param, f"must be {len(ids)}, the number of `logprob_token_ids`, or left out, got {asked}")
        return len(set(ids))
    if asked is not None:
        check_top_logprobs(param, asked)
    return asked


def parse_logit_bias(bias: dict[str, float] | None, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """(token id, bias) pairs. Raises RequestError 400 if there are too many, or one is out of range."""
    bias = bias or {}
    if len(bias) > MAX_LOGIT_BIAS:
        raise invalid("logit_bias", f"at most {MAX_LOGIT_BIAS} tokens are allowed, got {len(bias)}")
    pairs: dict[int, float] = {}
    biases = PARAMETERS["logit_bias"].range
    assert biases is not None
    if wrong := [key[:40] for key in bias if not _is_id(key, vocab_size)]:
        raise invalid(
            "logit_bias", f"a key must be a token id below {vocab_size}, got {', '.join(map(repr, wrong[:8]))}"
        )
    for key, value in bias.items():
        if value not in biases:
            raise invalid("logit_bias", f"a bias must be {biases}, got {value} for token {key}")
        pairs[int(key)] = value
    return tuple(pairs.items())


def _is_id(key: str, vocab_size: int) -> bool:
    return key.isascii() and key.isdigit() and len(key) <= 9 and int(key) < vocab_size


def check_ids(param: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raises RequestError 400 if one of the ids is not in the vocabulary."""
    for id in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= id < vocab_size:
            raise invalid(param, f"token id {id} is out of vocabulary, which has {vocab_size} tokens")


def check_counts(max_tokens: int | None, min_tokens: int | None, *, param: str, least: int = 1) -> None:
    """Raises RequestError 400 if the numbers of tokens are too small or contradict each other."""
    if max_tokens is not None and max_tokens < least:
        raise invalid(param, f"must be at least {least}, got {max_tokens}")
    if max_tokens is not None and min_tokens is not None and min_tokens > max_tokens:
        raise invalid("min_tokens", f"must not be greater than {param}, {min_tokens} > {max_tokens}")


def check_num_choices(num_prompts: int, n: int | None, *, most: int, prompts: str = "prompt") -> None:
    """Raises RequestError 400 if there are too many choices. Call it before prompts are encoded, because a body has
    room for millions of prompts. `prompts` is the name of the field with them."""
    if num_prompts * (n or 1) > most:
        param = "n" if num_prompts == 1 else prompts
        raise invalid(param, f"at most {most} sequences per request are allowed, prompts times n")


def _check_seed(seed: int | None) -> None:
    # The words in parentheses are pydantic's names of the constraints, which programs look for.
    if seed is not None and seed < INT64_MIN:
        raise invalid("seed", f"must be at least {INT64_MIN} (greater_than_equal), got {seed}")
    if seed is not None and seed > INT64_MAX:
        raise invalid("seed", f"must be at most {INT64_MAX} (less_than_equal), got {seed}")


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    for text in stops:
        if not text:
            raise invalid("stop", "a stop string must not be empty")
        if len(text) > MAX_STOP_CHARS:
            raise invalid("stop", f"a stop string has at most {MAX_STOP_CHARS} characters, got {len(text)}")
    return stops
