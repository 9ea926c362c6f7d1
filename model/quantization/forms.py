"""The names of the 8-bit forms of weights and activations. No jax here: configs and options name a form without
computing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class EightBit(StrEnum):
    """The type of an 8-bit kernel."""

    INT8 = "int8"
    FP8 = "fp8"  # e4m3, finite values only

    @classmethod
    def of(cls, dtype: object) -> EightBit:
        """The form of a kernel, by the kernel's dtype in numpy or jax."""
        return next(form for form in cls if form.dtype == dtype)

    @property
    def dtype(self) -> str:
        """As numpy and jax name it."""
        return "int8" if self is EightBit.INT8 else "float8_e4m3fn"

    @property
    def largest(self) -> float:
        """The kernel's value for the largest weight of a row."""
        return 127.0 if self is EightBit.INT8 else 448.0


class Activations(StrEnum):
    """What a quantised checkpoint says of the inputs of its projections."""

    EXACT = "exact"  # only the weights are quantised
    DYNAMIC = "dynamic"  # each token is rounded to the weights' type, with a scale of its own
    STATIC = "static"  # all tokens are rounded with one scale, which is stored for each projection


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """Rounds the inputs of products to the 8-bit type of the kernel, so that both sides of a product are narrow."""

    min_rows: int = 1  # products of fewer rows keep the activations' type
    is_static: bool = False  # each projection has an `input_scale`; the head has none
    with_head: bool = False  # otherwise the head's inputs keep their type
