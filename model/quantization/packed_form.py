"""Kernels of 4 or 8 bits that are packed into words: their tensors, their layouts, and how they are unpacked.

A weight is `(value - zero) * scale`. Values, zeros and scales are separate tensors. Each scale and each zero belongs to
one output and one group of inputs. In NVFP4 a value is a float of 4 bits, and one number scales all scales.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from functools import cached_property
from typing import Any

import numpy as np

from model.quantization.forms import Activations, EightBit, FourBit, ScaleFormat, WeightForm, largest_group
from model.quantization.stored_form import SCALES, Part, StoredForm

WORD_BITS = 32
WORDS = ("I32",)
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)  # by their 4 bits
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the n-th value of a word belongs to this one of eight neighbouring outputs
_MIDDLE = np.int8(8)  # the middle of the stored range of 4 bits, which becomes 0
_ROWS_AT_ONCE = 256  # rows that are dequantised together; bounds the temporary memory


class Layout(StrEnum):
    """The order of the values in the words. Messages show the value of a member."""

    GPTQ = "GPTQ"  # a word holds neighbouring inputs; the tensors are [in, out]
    AWQ = "AWQ"  # a word holds outputs in the order of `unpack.AWQ_ORDER`; the tensors are [in, out]
    ROWS = "compressed-tensors"  # a word holds neighbouring inputs; the tensors are [out, in]
    NVFP4 = "compressed-tensors NVFP4"  # as ROWS, with bytes as words
    MODELOPT = "ModelOpt NVFP4"


class Zeros(Enum):
    """The zero that is subtracted from a value."""

    MIDDLE = "the middle of the range"  # symmetric quantisation
    STORED = "as stored"
    LESS_ONE = "one more than stored"  # the first version of GPTQ's format


@dataclass(frozen=True, kw_only=True)
class PartNames:
    """The names of a kernel's tensors, in place of `weight`."""

    values: str
    scales: str
    zeros: str = ""
    groups: str | None = None  # the group of each input, if groups are not neighbouring inputs
    scale: str | None = None  # in NVFP4, the scale of all scales


NAMES = {
    Layout.GPTQ: PartNames(values="qweight", zeros="qzeros", scales="scales", groups="g_idx"),
    Layout.AWQ: PartNames(values="qweight", zeros="qzeros", scales="scales"),
    Layout.ROWS: PartNames(
        values="weight_packed", zeros="weight_zero_point", scales="weight_scale", groups="weight_g_idx"
    ),
    Layout.NVFP4: PartNames(values="weight_packed", scales="weight_scale", scale="weight_global_scale"),
    Layout.MODELOPT: PartNames(values="weight", scales="weight_scale", scale="weight_scale_2"),
}


@dataclass(frozen=True, kw_only=True)
class PackedForm(StoredForm):
    """The packed form of a checkpoint's projections."""

    layout: Layout
    bits: int
    group: int | None  # the number of inputs that share a scale; None: all inputs
    zeros: Zeros
    is_ordered: bool = False  # a tensor gives the group of each input

    form = EightBit.INT8  # the form to which the weights are requantised; every chip supports it
    activations = Activations.EXACT

    @property
    def is_float(self) -> bool:
        return NAMES[self.layout].scale is not None

    @property
    def name(self) -> str:
        """Such as "GPTQ int4"."""
        return str(self.layout) if self.is_float else f"{self.layout} int{self.bits}"

    @property
    def mark(self) -> str:
        names = NAMES[self.layout]
        return names.scale or names.values

    @property
    def per_word(self) -> int:
        """The number of values in a word."""
        return (8 if self.is_float else WORD_BITS) // self.bits

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
        numbers = ScaleFormat.NVFP4 if self.is_float else ScaleFormat.CHIP
        return FourBit(group=group, has_zeros=self.zeros is not Zeros.MIDDLE, numbers=numbers), None

    def in_exact_form(self, widths: Sequence[int], types: Mapping[str, Set[str]]) -> FourBit | None:
        """The 4-bit form of `in_four_bits` that keeps the scales as they are stored; None if there is none."""
        scales = types[NAMES[self.layout].scales]
        form, _ = self.in_four_bits(widths)
        if form is None or self.is_float or (scales == {"BF16"} and not form.has_zeros):  # the form of chips is exact
            return form
        named = {"F16": ScaleFormat.FLOAT16, "BF16": ScaleFormat.BFLOAT16, "F32": ScaleFormat.FLOAT32}
        numbers = {named[scale] for scale in scales}
        return replace(form, numbers=numbers.pop() if len(numbers) == 1 else ScaleFormat.FLOAT32)

    def num_groups(self, columns: int) -> int:
        """The number of groups in a row. The last may be shorter."""
        return 1 if self.group is None else -(-columns // self.group)

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        names, groups = NAMES[self.layout], self.num_groups(columns)
        row_words, column_words = -(-rows // self.per_word), -(-columns // self.per_word)
        if names.scale is not None:
            of_values, of_scales = Part(((rows, column_words),), ("U8",)), Part(((rows, groups),), ("F8_E4M3",))
            return {names.values: of_values, names.scales: of_scales, names.scale: Part(((), (1,)), ("F32",))}
        values, zeros, scales = {
            Layout.GPTQ: ((column_words, rows), (groups, row_words), (groups, rows)),
            Layout.AWQ: ((columns, row_words), (groups, row_words), (groups, rows)),
            Layout.ROWS: ((rows, column_words), (row_words, groups), (rows, groups)),
        }[self.layout]
        parts = {
            names.values: Part((values,), WORDS),
            names.zeros: Part((zeros,), WORDS, is_required=self.zeros is not Zeros.MIDDLE),
            names.scales: Part((scales,), SCALES),
        }
        if names.groups is not None:
            parts[names.groups] = Part(((columns,),), WORDS, is_required=self.is_ordered)
        return parts

    def kernel(self, name: str, parts: Mapping[str, Any], shape: tuple[int, ...]) -> PackedKernel:
        return PackedKernel(name, self, parts, shape)


class PackedKernel:
    """One kernel, with the interface of safetensors' slices.

    Args:
        name: of the module, for errors.
        parts: its tensors by the names of `PackedForm.parts`. Optional ones may be absent.
        shape: [out, in] of the weights.
    """

    def __init__(self, name: str, form: PackedForm, parts: Mapping[str, Any], shape: tuple[int, ...]):
        self._name = name
        self._form = form
        self._parts = parts
        self._shape = shape

    def read_once(self) -> PackedKernel:
        """The same kernel. Each of its tensors is read whole when it is first needed, and kept with the kernel."""
        parts = {name: _ReadOnce(part) for name, part in self._parts.items()}
        return PackedKernel(self._name, self._form, parts, self._shape)

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """f32 weights. ValueError if an input's group does not exist."""
        (first_row, end_row, _), (first, end, _) = (
            part.indices(size) for part, size in zip(index, self._shape, strict=True)
        )
        rows, columns = slice(first_row, end_row), slice(first, end)
        return dequantize_groups(
            self._form, self._values(rows, columns), self._zeros(rows), self._scales(rows), self._groups()[columns]
        )

    def part(self, name: str, index: tuple[slice, ...], form: WeightForm) -> np.ndarray:
        """The part of a parameter of a 4-bit form (`four_bit`) at `index`, before it is rounded to that form's types.

        Args:
            name: "kernel" (-> i8[out, in]), "scale" or "zero" (-> [out, in / group]), or "row_scale" (-> f32[out, 1]).
            form: the result of `PackedForm.in_four_bits` or of `in_exact_form`.

        Raises:
            ValueError: groups are not of neighbouring inputs, although the config says so.
        """
        num_out, num_in = self._shape
        rows = slice(*index[0].indices(num_out)[:2])
        if name == "kernel":
            values = self._values(rows, slice(*index[1].indices(num_in)[:2])).astype(np.int8)
            return np.where(values < 8, values, 8 - values) if self._form.is_float else values - _MIDDLE
        if name == "row_scale":
            of_all = self._scale_of_all()
            row = (of_all if self._form.layout is Layout.MODELOPT else 1 / of_all) / 2  # the kernel is in halves
            return np.full((rows.stop - rows.start, 1), row)
        assert isinstance(form, FourBit)
        size = self._form.group or num_in
        if not np.array_equal(self._groups(), np.arange(num_in) // size):
            raise ValueError(
                f"{self._name}: the groups are not of neighbouring inputs, although the config says so: load it with "
                f"--quantization int8"
            )
        groups = np.arange(num_in // form.group)[index[1]] * form.group // size
        if name == "scale":
            return self._stored_scales(rows)[:, groups]
        zeros = self._zeros(rows)
        assert zeros is not None
        zeros = zeros[:, groups]
        return zeros.astype(np.int8) - _MIDDLE if form.numbers is ScaleFormat.CHIP else zeros

    def _scales(self, rows: slice) -> np.ndarray:
        """[out, n]"""
        scales = self._stored_scales(rows)
        if not self._form.is_float:
            return scales
        wide, of_all = scales.astype(np.float32), self._scale_of_all()
        return wide * of_all if self._form.layout is Layout.MODELOPT else wide / of_all

    def _stored_scales(self, rows: slice) -> np.ndarray:
        """[out, n]; in NVFP4 without the scale of all scales."""
        layout = self._form.layout
        scales = self._parts[NAMES[layout].scales][...]
        return scales.T[rows] if layout in (Layout.GPTQ, Layout.AWQ) else scales[rows]

    def _scale_of_all(self) -> np.float32:
        """The scale of all scales of NVFP4. compressed-tensors stores what they are divided by."""
        name = NAMES[self._form.layout].scale
        assert name is not None
        (of_all,) = self._parts[name][...].reshape(1)
        if not 0 < of_all < np.inf:
            raise ValueError(f"{self._name}.{name} must be a positive number: {of_all}")
        return np.float32(of_all)

    def _values(self, rows: slice, columns: slice) -> np.ndarray:
        """u8[out, in]"""
        words, bits = self._parts[NAMES[self._form.layout].values], self._form.bits
        if self._form.layout is Layout.AWQ:
            shared, within = self._words_of(rows)
            return unpack_awq(words[columns, shared])[:, within].T
        shared, within = self._words_of(columns)
        packed = words[shared, rows].T if self._form.layout is Layout.GPTQ else words[rows, shared]
        return unpack(packed, bits)[:, within]

    def _words_of(self, values: slice) -> tuple[slice, slice]:
        """The words that hold these neighbouring values, and the values' place in the unpacked words."""
        per_word = self._form.per_word
        first = values.start // per_word
        start = values.start - first * per_word
        return slice(first, -(-values.stop // per_word)), slice(start, start + values.stop - values.start)

    def _zeros(self, rows: slice) -> np.ndarray | None:
        """u8[out, n]"""
        form = self._form
        if form.zeros is Zeros.MIDDLE:
            return None
        words = self._parts[NAMES[form.layout].zeros][...]
        if form.layout is Layout.AWQ:
            return unpack_awq(words).T[rows]
        if form.layout is Layout.ROWS:
            words = words.T  # rows share a word: [n, out / per_word], as GPTQ has it
        if form.zeros is Zeros.LESS_ONE:
            words = one_more(words, form.bits)
        return unpack(words, form.bits).T[rows]

    def _groups(self) -> np.ndarray:
        """i32[in]"""
        form, columns = self._form, self._shape[1]
        stored = NAMES[form.layout].groups
        # compressed-tensors may store groups that are not in use.
        is_used = form.is_ordered or form.layout is not Layout.ROWS
        if stored is None or stored not in self._parts or not is_used:
            return np.arange(columns) // (form.group or columns)
        groups = self._parts[stored][...]
        if groups.min() < 0 or groups.max() >= form.num_groups(columns):
            raise ValueError(f"{self._name}.{stored} names groups outside of 0 to {form.num_groups(columns) - 1}")
        return groups


class _ReadOnce:
    """A tensor that is read whole when it is first needed."""

    def __init__(self, part: Any):
        self._part = part

    @cached_property
    def _values(self) -> np.ndarray:
        return self._part[...]

    def __getitem__(self, index: Any) -> np.ndarray:
        return self._values[index]


def unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """[..., n] -> u8[..., n * the word's bits / bits], the lowest bits of each word first. `bits` is 4 or 8.

    Args:
        words: of int32 or uint8.
    """
    octets = np.ascontiguousarray(words).astype(words.dtype.newbyteorder("<"), copy=False).view(np.uint8)
    if bits == 8:
        return octets
    return np.stack([octets & 15, octets >> 4], axis=-1).reshape(*octets.shape[:-1], -1)


def unpack_awq(words: np.ndarray) -> np.ndarray:
    """Unpacks AWQ's words of 4-bit values: i32[..., n] -> u8[..., n * 8], in the order of the outputs."""
    values = unpack(words, 4).reshape(*words.shape, len(AWQ_ORDER))
    return values[..., np.argsort(AWQ_ORDER)].reshape(*words.shape[:-1], -1)


def one_more(words: np.ndarray, bits: int) -> np.ndarray:
    """The words with 1 added to each of their values.

    GPTQ's writers subtract from whole words, so that a value of 0 borrows from the next one. This addition carries.
    """
    ones = np.uint32(0xFFFFFFFF // ((1 << bits) - 1))
    return (np.ascontiguousarray(words).view(np.uint32) + ones).view(np.int32)


def dequantize_groups(
    form: PackedForm, values: np.ndarray, zeros: np.ndarray | None, scales: np.ndarray, groups: np.ndarray
) -> np.ndarray:
    """The weights f32[out, in]. They are exact if `scales` are 16-bit floats.

    Args:
        values: the stored values, u8[out, in].
        zeros: the zero of each group, u8[out, n]; None if they are the middle of the range.
        scales: the scale of each group, [out, n].
        groups: i32[in], the group of each input.
    """
    assert (zeros is None) == (form.zeros is Zeros.MIDDLE)
    weights = np.empty(values.shape, np.float32)
    for start in range(0, len(values), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        part = _E2M1[values[rows]] if form.is_float else values[rows].astype(np.float32)
        if not form.is_float:
            part -= 1 << (form.bits - 1) if zeros is None else zeros[rows].astype(np.float32)[:, groups]
        np.multiply(part, scales[rows].astype(np.float32)[:, groups], out=weights[rows])
    return weights
