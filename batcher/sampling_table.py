"""The table of sampling parameters: one entry for each field of `SamplingParams`.

An entry holds a parameter's range, its columns in a slot's state, and the program variant that it needs. Admission, the
packer, the server's checks and the device's unpacking read the table. A new parameter takes five edits: its field in
`batcher/request.py` (type and default), its entry here, its field in `server/api/request/schemas.py` and, for `LLM`, in
`scripts/offline/arguments.py`, and its column and use in `model/sampling/sampling.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from batcher.request import MAX_DEVICE_STOP_IDS, MAX_LOGIT_BIAS, MAX_LOGPROB_TOKEN_IDS, MAX_LOGPROBS, SamplingParams
from batcher.step import Variant

DType = Literal["int32", "uint32", "float32", "bool"]  # numpy's names
Value = bool | float | Sequence[int] | Sequence[float]


@dataclass(frozen=True, slots=True)
class Range:
    """An interval of numbers. No interval contains NaN. All bounds except infinity are finite as float32."""

    low: float
    high: float = math.inf
    low_open: bool = False

    def __contains__(self, number: float) -> bool:
        above = number > self.low if self.low_open else number >= self.low
        return above and number <= self.high

    def __str__(self) -> str:
        """The range in words that follow 'must be', such as "at least 0" or "in (0, 1]"."""
        if self.high == math.inf:
            return f"at least {self.low:g}"
        return f"in {'(' if self.low_open else '['}{self.low:g}, {self.high:g}]"


@dataclass(frozen=True, slots=True)
class Column:
    """A named part of a slot's state: one number of 32 bits, or a list of up to `width` numbers if `width` is not 1."""

    name: str
    dtype: DType
    width: int = 1


class Admitted(Protocol):
    """What the columns of an admitted request are computed from. `RequestState` has it."""

    sampling: SamplingParams
    seed: int
    num_prompt: int
    limit: int
    stop_ids: frozenset[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """One field of `SamplingParams`."""

    range: Range | None = None  # the range of the number, or of each bias of `logit_bias`
    columns: tuple[Column, ...] = ()  # empty: only the host reads the parameter
    values: Callable[[Admitted], tuple[Value, ...]]  # one for each column
    off: Any = None  # the value with which the parameter has no effect on the program
    variant: Variant = Variant.GREEDY  # the program that a row needs if the value is not `off`
    counts_tokens: bool = False  # if it is not `off`, the device counts the request's tokens


def _on_host(range: Range | None = None, *, off: Any = None, variant: Variant = Variant.GREEDY) -> Parameter:
    return Parameter(range=range, values=lambda _request: (), off=off, variant=variant)


def _number(name: str, dtype: DType, range: Range, **options: Any) -> Parameter:
    """A parameter whose number is sent to the device unchanged."""
    return Parameter(
        range=range,
        columns=(Column(name, dtype),),
        values=lambda request: (getattr(request.sampling, name),),
        **options,
    )


def _penalty(name: str, range: Range, off: float) -> Parameter:
    return _number(name, "float32", range, off=off, variant=Variant.SAMPLE, counts_tokens=True)


def _top_k(request: Admitted) -> tuple[Value, ...]:
    return (min(request.sampling.top_k, 2**31 - 1),)


def _seed(request: Admitted) -> tuple[Value, ...]:
    return ((request.seed & 0xFFFFFFFF, request.seed >> 32 & 0xFFFFFFFF),)


def _ban(request: Admitted) -> tuple[Value, ...]:
    """The stop ids, and the number of prompt and output tokens before which the device bans them."""
    min_tokens = request.sampling.min_tokens
    if not min_tokens:
        return 0, 0, ()
    return request.num_prompt + min(min_tokens, request.limit), len(request.stop_ids), sorted(request.stop_ids)


def _has_mask(request: Admitted) -> tuple[Value, ...]:
    s = request.sampling
    return (s.grammar is not None or s.allowed_token_ids is not None or bool(s.bad_words),)


def _bias(request: Admitted) -> tuple[Value, ...]:
    bias = request.sampling.logit_bias
    return len(bias), [token for token, _ in bias], [value for _, value in bias]


# `top_k`, `top_p`, `min_p` and `seed` need no variant: a row with temperature 0 ignores them.
PARAMETERS: dict[str, Parameter] = {
    "max_tokens": _on_host(Range(1)),
    "min_tokens": Parameter(
        range=Range(0),
        columns=(
            Column("min_kv_len", "int32"),
            Column("num_stop_ids", "int32"),
            Column("stop_ids", "int32", MAX_DEVICE_STOP_IDS),
        ),
        values=_ban,
        off=0,
        variant=Variant.SAMPLE,
    ),
    "temperature": _number("temperature", "float32", Range(0, 1e3), off=0, variant=Variant.SAMPLE),
    "top_k": Parameter(range=Range(0), columns=(Column("top_k", "int32"),), values=_top_k),
    "top_p": _number("top_p", "float32", Range(0, 1, low_open=True)),
    "min_p": _number("min_p", "float32", Range(0, 1)),
    "presence_penalty": _penalty("presence_penalty", Range(-2, 2), off=0),
    "frequency_penalty": _penalty("frequency_penalty", Range(-2, 2), off=0),
    # The device divides float32 logits by it: far from 1 the results would not be finite.
    "repetition_penalty": _penalty("repetition_penalty", Range(1e-3, 1e3), off=1),
    "logit_bias": Parameter(
        range=Range(-100, 100),
        columns=(
            Column("num_bias", "int32"),
            Column("bias_ids", "int32", MAX_LOGIT_BIAS),
            Column("bias_values", "float32", MAX_LOGIT_BIAS),
        ),
        values=_bias,
        off=(),
        variant=Variant.SAMPLE,
    ),
    "seed": Parameter(columns=(Column("seed", "uint32", 2),), values=_seed),
    "stop_token_ids": _on_host(),
    "ignore_eos": _on_host(),
    "logprobs": Parameter(
        range=Range(0, MAX_LOGPROBS),
        columns=(Column("wants_logprobs", "bool"),),
        values=lambda request: (request.sampling.logprobs is not None or bool(request.sampling.logprob_token_ids),),
        variant=Variant.SAMPLE,
    ),
    "logprob_token_ids": Parameter(
        columns=(Column("logprob_token_ids", "int32", MAX_LOGPROB_TOKEN_IDS),),
        values=lambda request: (request.sampling.logprob_token_ids,),
        off=(),
        variant=Variant.SAMPLE,
    ),
    "sampled_logprobs": Parameter(
        columns=(Column("wants_sampled_logprobs", "bool"),),
        values=lambda request: (request.sampling.sampled_logprobs,),
        off=False,
        variant=Variant.SAMPLE,
    ),
    "allowed_token_ids": _on_host(variant=Variant.SAMPLE),  # a mask like a grammar's, but constant
    "bad_words": _on_host(off=(), variant=Variant.SAMPLE),  # masks, of which some follow from the last tokens
    "grammar": Parameter(
        columns=(Column("has_mask", "bool"),),
        values=_has_mask,
        variant=Variant.SAMPLE,
    ),
    # Steps need SCORE only until the prompt is computed: see `RequestState.wants_prompt_logprobs`.
    "prompt_logprobs": _on_host(Range(0, MAX_LOGPROBS), variant=Variant.SCORE),
}


def is_asked(sampling: SamplingParams, name: str) -> bool:
    """Whether the parameter is not `off`."""
    return bool(getattr(sampling, name) != PARAMETERS[name].off)
