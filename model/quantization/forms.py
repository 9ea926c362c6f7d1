"""The names of the forms of weights and activations. No jax here: configs and options name a form without computing."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar


class EightBit(StrEnum):
    """The type of an 8-bit kernel."""

    INT8 = "int8"
    FP8 = "fp8"  # e4m3, finite values only

    @property
    def kind(self) -> str:
        """The name by which a user asks for it, and `pallas_kernels.chips` says which chips read it."""
        return str(self)

    @property
    def bits(self) -> int:
        """Of a weight."""
        return 8

    @property
    def group(self) -> int:
        """The number of inputs that a chip's part of a kernel is a multiple of."""
        return 1

    @property
    def in_head(self) -> EightBit:
        """The form of the head if the projections have this one."""
        return self

    def in_words(self) -> str:
        """For messages."""
        return str(self)

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


@dataclass(frozen=True, kw_only=True)
class FourBit:
    """Kernels of the projections in int4, with a scale for each output and each group of neighbouring inputs. The head
    is in int8: in int4 it would lose more than all projections of a layer.

    Raises:
        ValueError: the group has fewer than `MIN_GROUP` inputs.
    """

    group: int  # inputs that share a scale
    has_zeros: bool = False  # each group has a zero, too, which is subtracted from its values
    # As of `EightBit`.
    kind: ClassVar[str] = "int4"
    bits: ClassVar[int] = 4
    in_head: ClassVar[EightBit] = EightBit.INT8

    def __post_init__(self) -> None:
        if self.group < MIN_GROUP:
            raise ValueError(f"int4 needs groups of {MIN_GROUP} inputs or more: {self.group=}")

    def __str__(self) -> str:
        return f"{self.kind}-g{self.group}" + ("-zeros" if self.has_zeros else "")

    def in_words(self) -> str:
        """For messages."""
        return f"{self.kind}, groups of {self.group}" + (" with zero points" if self.has_zeros else "")


WeightForm = EightBit | FourBit
FORM_NAMES = (*map(str, EightBit), FourBit.kind)  # as a user names them
# Of inputs. With larger groups hardly any bytes are saved: a scale has 16 bits, and 128 weights have 512.
MAX_GROUP, MIN_GROUP = 128, 16


def largest_group(widths: Iterable[int], limit: int = MAX_GROUP) -> int | None:
    """The largest divisor of `limit` and of all numbers of inputs; None if it is below `MIN_GROUP`."""
    group = math.gcd(limit, *widths)
    return group if group >= MIN_GROUP else None


_FORM_NAME = re.compile(FourBit.kind + r"(?:-g(\d{1,5})(-zeros)?)?")


def is_form_name(name: object) -> bool:
    """Whether `form_named` reads it, for some numbers of inputs."""
    return isinstance(name, str) and (name in tuple(EightBit) or _FORM_NAME.fullmatch(name) is not None)


def form_named(name: str, widths: Iterable[int]) -> WeightForm:
    """The form of a name: "int8", "fp8", "int4" with the largest group for kernels of these numbers of inputs, or as
    `str` writes a `FourBit`. ValueError if there is none."""
    if name in tuple(EightBit):
        return EightBit(name)
    match = _FORM_NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is no form of weights; it is one of {', '.join(FORM_NAMES)}")
    widths = tuple(widths)
    group = int(match[1]) if match[1] else largest_group(widths)
    if group is None or any(width % group for width in widths):
        raise ValueError(f"{name}: the numbers of inputs {widths} have no common groups of {MIN_GROUP} or more")
    return FourBit(group=group, has_zeros=match[2] is not None)


def described(form: WeightForm) -> str:
    """Of a model with projections in `form`, in words."""
    if form.in_head == form:
        return f"projections and head are {form.in_words()}"
    return f"projections are {form.in_words()}, and the head is {form.in_head.in_words()}"


class Activations(StrEnum):
    """What a quantised checkpoint says of the inputs of its projections."""

    EXACT = "exact"  # only the weights are quantised
    DYNAMIC = "dynamic"  # each token is rounded to the weights' type, with a scale of its own
    STATIC = "static"  # all tokens are rounded with one scale, which is stored for each projection


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """Rounds the inputs of products to the 8-bit type of the kernel, so that both sides of a product have 8 bits."""

    min_rows: int = 1  # products of fewer rows keep the activations' type
    is_static: bool = False  # each projection has an `input_scale`; the head has none
    with_head: bool = False  # otherwise the head's inputs keep their type
