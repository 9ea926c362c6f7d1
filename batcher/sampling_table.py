"""The table of sampling parameters: one entry for each field of `SamplingParams`.

An entry says what a parameter may be, how a slot's state holds it, and which program it needs. Admission, the packer,
the server's checks and the device's unpacking read it. A parameter is added by four edits: its field in
`batcher/request.py` (type and default), its entry here, its field in `server/api/schemas.py`, and in
`model/sampling/sampling.py` its column and its use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from batcher.request import MAX_DEVICE_STOP_IDS, MAX_LOGIT_BIAS, MAX_LOGPROBS, SamplingParams
from batcher.step import Variant

DType = Literal["int32", "uint32", "float32", "bool"]  # numpy's names
Value = bool | float | Sequence[int] | Sequence[float]


@dataclass(frozen=True, slots=True)
class Range:
    """An interval of numbers. NaN is in none; every bound but infinity is a finite float32."""

    low: float
    high: float = math.inf
    low_open: bool = False

    def __contains__(self, number: float) -> bool:
        above = number > self.low if self.low_open else number >= self.low
        return above and number <= self.high

    def __str__(self) -> str:
        """As in 'must be {range}'."""
        if self.high == math.inf:
            return f"at least {self.low:g}"
        return f"in {'(' if self.low_open else '['}{self.low:g}, {self.high:g}]"


@dataclass(frozen=True, slots=True)
class Column:
    """What a slot's state holds under one name: a number of 32 bits, or up to `width` of them where that is not 1."""

    name: str
    dtype: DType
    width: int = 1


class Admitted(Protocol):
    """A request as it is admitted: what its columns are computed from. `batcher.sequence.Sequence` is one."""

    sampling: SamplingParams
    seed: int
    num_prompt: int
    limit: int
    stop_ids: frozenset[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """One field of `SamplingParams`."""

    range: Range | None = None  # of the number, where it is one; of each bias for `logit_bias`
    columns: tuple[Column, ...] = ()  # none: only the host reads it
    values: Callable[[Admitted], tuple[Value, ...]]  # one for each column
    off: Any = None  # with this value the parameter asks nothing of the program
    variant: Variant = Variant.GREEDY  # that a row needs where the value is not `off`
    counts_tokens: bool = False  # where it is not `off`, the device keeps the history of the request's tokens


def _on_host(range: Range | None = None, *, off: Any = None, variant: Variant = Variant.GREEDY) -> Parameter:
    return Parameter(range=range, values=lambda _request: (), off=off, variant=variant)


def _number(name: str, dtype: DType, range: Range, **options: Any) -> Parameter:
    """A parameter that travels as it is."""
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
    """The device bans the stop ids at the positions before which the request must not end."""
    min_tokens = request.sampling.min_tokens
    if not min_tokens:
        return 0, 0, ()
    return request.num_prompt + min(min_tokens, request.limit), len(request.stop_ids), sorted(request.stop_ids)


def _has_mask(request: Admitted) -> tuple[Value, ...]:
    return (request.sampling.grammar is not None or request.sampling.allowed_token_ids is not None,)


def _bias(request: Admitted) -> tuple[Value, ...]:
    bias = request.sampling.logit_bias
    return len(bias), [token for token, _ in bias], [value for _, value in bias]


# `top_k`, `top_p`, `min_p` and `seed` need no program of their own: a row with temperature 0 ignores them.
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
    # The device divides float32 logits by it: far from 1 nothing finite would be left.
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
        values=lambda request: (request.sampling.logprobs is not None,),
        variant=Variant.SAMPLE,
    ),
    "allowed_token_ids": _on_host(variant=Variant.SAMPLE),  # a mask, like a grammar's, that is brought once
    "grammar": Parameter(
        columns=(Column("has_mask", "bool"),),
        values=_has_mask,
        variant=Variant.SAMPLE,
    ),
    # Steps need SCORE only until the prompt is computed: `Sequence.wants_prompt_logprobs` says when.
    "prompt_logprobs": _on_host(Range(0, MAX_LOGPROBS), variant=Variant.SCORE),
}


def column_values(request: Admitted) -> Iterator[tuple[Column, Value]]:
    """Everything that the slot's state holds of the request's sampling."""
    for parameter in PARAMETERS.values():
        yield from zip(parameter.columns, parameter.values(request), strict=True)


def is_asked(sampling: SamplingParams, name: str) -> bool:
    """Whether the parameter asks anything of the program."""
    return bool(getattr(sampling, name) != PARAMETERS[name].off)
