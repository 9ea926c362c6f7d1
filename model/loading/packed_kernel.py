"""Slices of packed kernels, read as float32 weights or in the parts of the 4-bit form."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from model.quantization.forms import FourBit, ScaleFormat
from model.quantization.packed_form import NAMES, Layout, PackedForm, Zeros
from model.quantization.unpack import dequantize_groups, one_more, unpack, unpack_awq

_MIDDLE = np.int8(8)  # the middle of the stored range, which becomes 0


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

    def part(self, name: str, index: tuple[slice, ...], form: FourBit) -> np.ndarray:
        """The part of a parameter of a 4-bit form (`four_bit`) at `index`, before it is rounded to that form's types.

        Args:
            name: "kernel" (-> i8[out, in]), or "scale" or "zero" (-> [out, in / group]).
            form: the result of `PackedForm.in_four_bits` or `in_exact_four_bits`.

        Raises:
            ValueError: groups are not of neighbouring inputs, although the config says so.
        """
        num_out, num_in = self._shape
        rows = slice(*index[0].indices(num_out)[:2])
        if name == "kernel":
            return self._values(rows, slice(*index[1].indices(num_in)[:2])).astype(np.int8) - _MIDDLE
        size = self._form.group or num_in
        if not np.array_equal(self._groups(), np.arange(num_in) // size):
            raise ValueError(
                f"{self._name}: the groups are not of neighbouring inputs, although the config says so: load it with "
                f"--quantization int8"
            )
        groups = np.arange(num_in // form.group)[index[1]] * form.group // size
        if name == "scale":
            return self._scales(rows)[:, groups]
        zeros = self._zeros(rows)
        assert zeros is not None
        zeros = zeros[:, groups]
        return zeros.astype(np.int8) - _MIDDLE if form.numbers is ScaleFormat.CHIP else zeros

    def _scales(self, rows: slice) -> np.ndarray:
        """[out, n]"""
        scales = self._parts[NAMES[self._form.layout].scales][...]
        return scales[rows] if self._form.layout is Layout.ROWS else scales.T[rows]

    def _values(self, rows: slice, columns: slice) -> np.ndarray:
        """u8[out, in]"""
        words, bits = self._parts[NAMES[self._form.layout].values], self._form.bits
        if self._form.layout is Layout.AWQ:
            shared, within = self._words_of(rows)
            return unpack_awq(words[columns, shared])[:, within].T
        shared, within = self._words_of(columns)
        packed = words[rows, shared] if self._form.layout is Layout.ROWS else words[shared, rows].T
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
