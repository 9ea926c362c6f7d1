"""Kernels of 4 or 8 bits that are packed into 32-bit words: the tensors of a kernel and their layout.

A weight is `(value - zero) * scale`. Values, zeros and scales are separate tensors. Each scale and each zero belongs to
one output and one group of inputs.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from enum import Enum, StrEnum

from model.quantization.forms import Activations, EightBit, FourBit, ScaleFormat, largest_group

WORD_BITS = 32
WORDS = ("I32",)
SCALES = ("F16", "BF16", "F32")


class Layout(StrEnum):
    """The order of the values in the words. Messages show the value of a member."""

    GPTQ = "GPTQ"  # a word holds neighbouring inputs; the tensors are [in, out]
    AWQ = "AWQ"  # a word holds outputs in the order of `unpack.AWQ_ORDER`; the tensors are [in, out]
    ROWS = "compressed-tensors"  # a word holds neighbouring inputs; the tensors are [out, in]


class Zeros(Enum):
    """The zero that is subtracted from a value."""

    MIDDLE = "the middle of the range"  # symmetric quantisation
    STORED = "as stored"
    LESS_ONE = "one more than stored"  # the first version of GPTQ's format


@dataclass(frozen=True)
class Part:
    """One of the tensors of a kernel."""

    shape: tuple[int, ...]
    types: tuple[str, ...]
    is_required: bool = True


@dataclass(frozen=True, kw_only=True)
class PartNames:
    """The names of a kernel's tensors, in place of `weight`."""

    values: str
    zeros: str
    scales: str
    groups: str | None  # the group of each input, if groups are not neighbouring inputs


NAMES = {
    Layout.GPTQ: PartNames(values="qweight", zeros="qzeros", scales="scales", groups="g_idx"),
    Layout.AWQ: PartNames(values="qweight", zeros="qzeros", scales="scales", groups=None),
    Layout.ROWS: PartNames(
        values="weight_packed", zeros="weight_zero_point", scales="weight_scale", groups="weight_g_idx"
    ),
}


@dataclass(frozen=True, kw_only=True)
class PackedForm:
    """The packed form of a checkpoint's projections."""

    layout: Layout
    bits: int
    group: int | None  # the number of inputs that share a scale; None: all inputs
    zeros: Zeros
    is_ordered: bool = False  # a tensor gives the group of each input

    form = EightBit.INT8  # the form to which the weights are requantised; every chip supports it
    activations = Activations.EXACT

    @property
    def name(self) -> str:
        """The name of the form in messages, such as "GPTQ int4"."""
        return f"{self.layout} int{self.bits}"

    @property
    def per_word(self) -> int:
        """The number of values in a word."""
        return WORD_BITS // self.bits

    def in_four_bits(self, widths: Sequence[int]) -> tuple[FourBit | None, str | None]:
        """The 4-bit form that holds kernels with these numbers of inputs without requantising them, or the reason why
        there is none. If stored groups are larger than the form's, their scales are repeated."""
        if self.bits != 4:
            return None, f"it has {self.bits} bits"
        if self.is_ordered:
            return None, "its groups are not of neighbouring inputs"
        group = largest_group(widths) if self.group is None else largest_group((self.group, *widths))
        if group is None:
            return None, f"groups of {self.group} do not divide the numbers of inputs {tuple(widths)}"
        return FourBit(group=group, has_zeros=self.zeros is not Zeros.MIDDLE), None

    def in_exact_four_bits(self, widths: Sequence[int], scales: Set[str]) -> FourBit | None:
        """The 4-bit form of `in_four_bits` that keeps the scales as they are stored; None if there is none.

        Args:
            scales: the types of the stored scales, from `SCALES`.
        """
        form, _ = self.in_four_bits(widths)
        if form is None or (scales == {"BF16"} and not form.has_zeros):  # the form of chips is exact
            return form
        named = {"F16": ScaleFormat.FLOAT16, "BF16": ScaleFormat.BFLOAT16, "F32": ScaleFormat.FLOAT32}
        types = {named[scale] for scale in scales}
        return replace(form, numbers=types.pop() if len(types) == 1 else ScaleFormat.FLOAT32)

    def num_groups(self, columns: int) -> int:
        """The number of groups in a row. The last may be shorter."""
        return 1 if self.group is None else -(-columns // self.group)

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        """The tensors of a kernel [rows, columns], by name."""
        names, groups = NAMES[self.layout], self.num_groups(columns)
        row_words, column_words = -(-rows // self.per_word), -(-columns // self.per_word)
        values, zeros, scales = {
            Layout.GPTQ: ((column_words, rows), (groups, row_words), (groups, rows)),
            Layout.AWQ: ((columns, row_words), (groups, row_words), (groups, rows)),
            Layout.ROWS: ((rows, column_words), (row_words, groups), (rows, groups)),
        }[self.layout]
        parts = {
            names.values: Part(values, WORDS),
            names.zeros: Part(zeros, WORDS, is_required=self.zeros is not Zeros.MIDDLE),
            names.scales: Part(scales, SCALES),
        }
        if names.groups is not None:
            parts[names.groups] = Part((columns,), WORDS, is_required=self.is_ordered)
        return parts
