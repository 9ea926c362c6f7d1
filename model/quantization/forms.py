"""The forms of weights and activations, and their names. Configs and options use this module, so it imports no jax."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import ClassVar


class WeightForm:
    """How the weights of a kernel, or of all kernels of a model, are stored. `str` gives the name of a form.

    The defaults are those of a form with 8 bits that all kernels and the head have.

    Attributes:
        kind: the name of the form in `--quantization`.
        bits: bits of one weight, without scales.
        is_grouped: groups of inputs have scales. A checkpoint's own groups can be kept, and inputs are rounded in
            blocks.
        whole: a kernel that is split by inputs over chips has a multiple of this many inputs on each chip.
    """

    kind: str
    bits = 8
    is_grouped = False
    whole = 1

    @classmethod
    def named(cls, name: str, widths: tuple[int, ...]) -> WeightForm | None:
        """The form of this class with this name, for kernels with these numbers of inputs. None: the name is another
        class's, or no such kernels can have the form."""
        raise NotImplementedError

    @property
    def product(self) -> str:
        """The name of the form in `pallas_kernels.chips`, which says which chips multiply with it."""
        return self.kind

    @property
    def in_head(self) -> WeightForm:
        """The form of the head if the projections have this one."""
        return self

    @property
    def in_int8(self) -> WeightForm:
        """The form in int8, which every chip reads. Projections that are not quantised stay as they are."""
        return EightBit.INT8

    def at(self, path: str) -> WeightForm:
        """The form of the projection at `path`, such as "layers.3.mlp.down", or of the head at `HEAD_PATH`. One tensor
        of a fused projection has a path, too: "layers.3.attention.qkv.v_proj"."""
        return self.in_head if path == HEAD_PATH else self

    def is_split(self, path: str) -> bool:
        """Whether the tensors of the fused projection at `path` have several forms."""
        return False

    def inputs_of(self, parameter: str) -> int:
        """The neighbouring inputs that share a number of this parameter of a kernel, such as of its scales."""
        raise NotImplementedError

    def in_words(self) -> str:
        """The description of the form in messages. A head of another form is left out."""
        return str(self)


HEAD_PATH = "head"


class EightBit(WeightForm, StrEnum):
    """The type of an 8-bit kernel."""

    INT8 = "int8"
    FP8 = "fp8"  # e4m3, finite values only

    @property
    def kind(self) -> str:  # type: ignore[override]  # each member has its own
        return self.value

    @classmethod
    def named(cls, name: str, widths: tuple[int, ...]) -> EightBit | None:
        return cls(name) if name in tuple(cls) else None

    @classmethod
    def of(cls, dtype: object) -> EightBit:
        """The form of a kernel with this dtype of numpy or jax."""
        return next(form for form in cls if form.dtype == dtype)

    @property
    def dtype(self) -> str:
        """The kernel's dtype, by its name in numpy and jax."""
        return "int8" if self is EightBit.INT8 else "float8_e4m3fn"

    @property
    def largest(self) -> float:
        """The largest value of a kernel. The scale of a row maps the row's largest weight to it."""
        return 127.0 if self is EightBit.INT8 else 448.0


class ScaleFormat(StrEnum):
    """The numbers that a 4-bit kernel stores for each output and group. Chips read `CHIP` and `NVFP4`; CPUs read all
    except `NVFP4`."""

    CHIP = "chip"  # a scale in bfloat16, and perhaps a zero in bfloat16
    NVFP4 = "nvfp4"  # a scale in bfloat16, which holds every e4m3; the kernel's numbers are codes of e2m1
    BFLOAT16 = "bf16"  # a scale, and perhaps a zero in uint8
    FLOAT16 = "f16"  # a scale, and perhaps a zero in uint8
    FLOAT32 = "f32"  # a scale, and perhaps a zero in uint8
    Q4_1 = "q4_1"  # a scale and an offset in float16
    Q4_K = "q4_k"  # a scale and an offset of 6 bits; eight groups share the float16 units of both

    @property
    def has_offsets(self) -> bool:
        """Whether a group has an offset, which is subtracted after scaling. A zero is subtracted before scaling."""
        return self in (ScaleFormat.Q4_1, ScaleFormat.Q4_K)

    @property
    def scale_dtype(self) -> str:
        """The dtype of the scales, by its name in numpy and jax."""
        others = {
            ScaleFormat.FLOAT32: "float32",
            ScaleFormat.FLOAT16: "float16",
            ScaleFormat.Q4_1: "float16",
            ScaleFormat.Q4_K: "uint8",
        }
        return others.get(self, "bfloat16")


GROUPS_OF_A_UNIT = 8  # groups that share one float16 unit in `Numbers.Q4_K`


# Inputs of a group. Larger groups save hardly any bytes: a scale has 16 bits, and 128 weights have 512.
MAX_GROUP, MIN_GROUP = 128, 16
NVFP4_GROUP = 16


def largest_group(widths: Iterable[int], limit: int = MAX_GROUP) -> int | None:
    """The largest divisor of `limit` and of all numbers of inputs; None if it is below `MIN_GROUP`."""
    group = math.gcd(limit, *widths)
    return group if group >= MIN_GROUP else None


@dataclass(frozen=True, kw_only=True)
class FourBit(WeightForm):
    """Projections in int4, with a scale for each output and each group of neighbouring inputs. The head is in int8: in
    int4 it would lose more accuracy than all projections of a layer. Next to NVFP4 it stays as it is, which makes the
    whole model exact.

    Raises:
        ValueError: the group has fewer than `MIN_GROUP` inputs, or other than 16 in NVFP4, or the form has both zeros
            and offsets, or zeros in NVFP4.
    """

    group: int  # inputs that share a scale
    has_zeros: bool = False  # each group also has a zero, which is subtracted from the kernel's values
    numbers: ScaleFormat = ScaleFormat.CHIP
    kind = "int4"
    bits = 4
    is_grouped = True

    def __post_init__(self) -> None:
        if self.group < MIN_GROUP:
            raise ValueError(f"int4 needs groups of {MIN_GROUP} inputs or more: {self.group=}")
        if self.has_zeros and self.numbers.has_offsets:
            raise ValueError(f"int4 has zeros or offsets, not both: {self.numbers=}")
        if self.is_float and (self.group != NVFP4_GROUP or self.has_zeros):
            raise ValueError(f"NVFP4 has groups of {NVFP4_GROUP} inputs without zeros: {self.group=} {self.has_zeros=}")

    @classmethod
    def named(cls, name: str, widths: tuple[int, ...]) -> FourBit | None:
        """The form with this name. "int4" alone takes the largest group that divides all widths."""
        match = _FOUR_BIT_NAME.fullmatch(name)
        group = (int(match[1]) if match[1] else largest_group(widths)) if match else None
        if match is None or group is None:
            return None
        form = cls(group=group, numbers=ScaleFormat(match[2] or ScaleFormat.CHIP), has_zeros=match[3] is not None)
        return None if any(width % form.whole for width in widths) else form

    def __str__(self) -> str:
        numbers = "" if self.numbers is ScaleFormat.CHIP else f"-{self.numbers}"
        return f"{self.kind}-g{self.group}{numbers}" + ("-zeros" if self.has_zeros else "")

    @property
    def is_float(self) -> bool:
        """Whether the kernel's numbers are floats of 4 bits."""
        return self.numbers is ScaleFormat.NVFP4

    @property
    def in_head(self) -> WeightForm:
        return Plain() if self.is_float else EightBit.INT8

    @property
    def product(self) -> str:
        """The name of the form in `pallas_kernels.chips`. Groups that are no multiple of 32 have names of their own."""
        if self.is_float:
            return self.numbers.value
        small = "" if self.group % 32 == 0 else "-g16"
        return f"{self.kind}{small}" + ("" if self.numbers is ScaleFormat.CHIP else "-exact")

    @property
    def whole(self) -> int:  # type: ignore[override]
        """A chip's part of a kernel has whole groups, and whole units of groups in `Q4_K`."""
        return self.group * (GROUPS_OF_A_UNIT if self.numbers is ScaleFormat.Q4_K else 1)

    def inputs_of(self, parameter: str) -> int:
        return 1 if parameter == "kernel" else self.whole if parameter.endswith("_unit") else self.group

    def in_words(self) -> str:
        if self.is_float:
            return f"NVFP4, groups of {self.group}"
        groups = f"{self.kind}, groups of {self.group}"
        if self.numbers.has_offsets:
            return f"{groups} as in {self.numbers.name}"
        with_them = [] if self.numbers is ScaleFormat.CHIP else [f"{self.numbers.scale_dtype} scales"]
        with_them += ["zero points"] if self.has_zeros else []
        return groups + (f" with {' and '.join(with_them)}" if with_them else "")


_FOUR_BIT_NAME = re.compile(FourBit.kind + r"(?:-g(\d{1,5})(?:-(nvfp4|bf16|f16|f32|q4_1|q4_k))?(-zeros)?)?")


@dataclass(frozen=True)
class SixBit(WeightForm):
    """Projections and a head as in GGUF's `Q6_K`: int6, with a scale of 8 bits for each output and group of 16
    neighbouring inputs. 16 scales share a float16 unit. Only CPUs read this form."""

    kind = "int6"
    bits = 6
    is_grouped = True
    group: ClassVar[int] = 16
    whole = 256  # inputs of a unit

    @classmethod
    def named(cls, name: str, widths: tuple[int, ...]) -> SixBit | None:
        return None if name != str(cls()) or any(width % cls.whole for width in widths) else cls()

    def __str__(self) -> str:
        return f"{self.kind}-g{self.group}-q6_k"

    def inputs_of(self, parameter: str) -> int:
        return {"kernel": 1, "kernel_upper": 4, "scale": self.group, "scale_unit": self.whole}[parameter]

    def in_words(self) -> str:
        return f"{self.kind}, groups of {self.group} as in Q6_K"


@dataclass(frozen=True)
class Plain(WeightForm):
    """Projections in the type of the computation, next to others that are quantised."""

    kind = "plain"
    bits = 16

    @classmethod
    def named(cls, name: str, widths: tuple[int, ...]) -> Plain | None:
        return cls() if name == cls.kind else None

    def __str__(self) -> str:
        return self.kind

    def in_words(self) -> str:
        return "the type of the computation"


FORMS: tuple[type[WeightForm], ...] = (EightBit, FourBit, SixBit, Plain)  # of one kernel
FORM_NAMES = (*map(str, EightBit), FourBit.kind)  # the values of `--quantization`


@dataclass(frozen=True, kw_only=True)
class MixedForms(WeightForm):
    """Projections of several forms, as in many GGUF files and where some are not quantised, and a head that may have
    another form than `most.in_head`.

    A path names a projection ("layers.3.mlp.down"). If the tensors of a fused projection have several forms, a path
    names one of these tensors ("layers.3.attention.qkv.v_proj").
    """

    most: WeightForm  # the form of the projections that are not in `others`
    # (path of a projection or of the head, its form), sorted by path
    others: tuple[tuple[str, WeightForm], ...]

    def __str__(self) -> str:
        return "+".join([str(self.most), *(f"{form}:{','.join(paths)}" for form, paths in self._paths.items())])

    @property
    def kind(self) -> str:  # type: ignore[override]
        """The `kind` of the form that most projections have."""
        return self.most.kind

    @property
    def is_grouped(self) -> bool:  # type: ignore[override]
        return self.most.is_grouped

    @property
    def product(self) -> str:
        """The `product` of the form that most projections have. Chips that read it exactly read the others, too."""
        return self.most.product

    @property
    def bits(self) -> int:  # type: ignore[override]
        """Bits of one weight in most projections, without scales."""
        return self.most.bits

    @property
    def whole(self) -> int:  # type: ignore[override]
        """The largest `whole` of all projections. The head does not count: it is never split by inputs."""
        return max([self.most.whole, *(form.whole for path, form in self.others if path != HEAD_PATH)])

    @property
    def in_head(self) -> WeightForm:
        return self.at(HEAD_PATH)

    @property
    def in_int8(self) -> WeightForm:
        plain = tuple((path, form) for path, form in self.others if form == Plain())
        return replace(self, most=EightBit.INT8, others=plain) if plain else EightBit.INT8

    def at(self, path: str) -> WeightForm:
        fused, _, _ = path.rpartition(".")
        return self._forms.get(path) or self._forms.get(fused) or self.most.at(path)

    def is_split(self, path: str) -> bool:
        return any(other.startswith(f"{path}.") for other, _ in self.others)

    def in_words(self) -> str:
        counts = {form: len(set(paths) - {HEAD_PATH}) for form, paths in self._paths.items()}
        others = [f"{count} in {form.in_words()}" for form, count in counts.items() if count]
        return self.most.in_words() + (f" ({'; '.join(others)})" if others else "")

    @cached_property
    def _forms(self) -> Mapping[str, WeightForm]:
        return dict(self.others)

    @cached_property
    def _paths(self) -> Mapping[WeightForm, list[str]]:
        paths: dict[WeightForm, list[str]] = {}
        for path, form in self.others:
            paths.setdefault(form, []).append(path)
        return paths


_PATHS = re.compile(r"[\w.]+(?:,[\w.]+)*")


def form_named(name: str, widths: Iterable[int]) -> WeightForm:
    """The form with this name.

    Args:
        name: a value of `--quantization`, or what `str` gives for a form.
        widths: the numbers of inputs of the model's kernels.

    Raises:
        ValueError: no form has this name, or kernels with these `widths` cannot have it.
    """
    widths = tuple(widths)
    most, *others = name.split("+")
    form = _one_named(most, widths)
    if not others:
        return form
    forms: dict[str, WeightForm] = {}
    for other in others:
        one, _, paths = other.partition(":")
        if not _PATHS.fullmatch(paths):
            raise ValueError(f"{other!r} names no projections")
        forms |= {path: _one_named(one, () if path == HEAD_PATH else widths) for path in paths.split(",")}
    if not form.is_grouped and {*forms.values()} != {Plain()}:
        raise ValueError(f"{most}: only projections in int4 or int6 have others next to them that are quantised")
    return MixedForms(most=form, others=tuple(sorted(forms.items(), key=lambda item: item[0])))


def _one_named(name: str, widths: tuple[int, ...]) -> WeightForm:
    found = next(filter(None, (form.named(name, widths) for form in FORMS)), None)
    if found is None:
        raise ValueError(
            f"{name!r} is no form of weights for kernels with {widths} inputs; it is one of {', '.join(FORM_NAMES)}, "
            f"and int4 needs common groups of {MIN_GROUP} inputs or more"
        )
    return found


def described(form: WeightForm) -> str:
    """A clause for messages that says in which forms the projections and the head are."""
    if form.in_head == form:
        return f"projections and head are {form.in_words()}"
    return f"projections are {form.in_words()}, and the head is {form.in_head.in_words()}"


class Activations(StrEnum):
    """How a quantised checkpoint wants the inputs of its projections to be rounded."""

    EXACT = "exact"  # only the weights are quantised
    BLOCKS = "blocks"  # GGUF: only the weights are quantised, but a CPU may round inputs, as llama.cpp does
    DYNAMIC = "dynamic"  # each token is rounded to the weights' type, with a scale of its own
    STATIC = "static"  # all tokens are rounded with one scale, which is stored for each projection


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """Rounds the inputs of products to the 8-bit type of the kernel, so that both sides of a product have 8 bits. The
    inputs of kernels in 4 or 6 bits are rounded to int8, with a scale for each token and block of 256 inputs."""

    min_rows: int = 1  # the inputs of products with fewer rows are not rounded
    is_static: bool = False  # each projection has an `input_scale`; the head has none
    with_head: bool = False  # whether the inputs of the head are rounded, too
