"""Unpacks the values of packed kernels and computes their weights, in numpy on the host."""

from __future__ import annotations

import numpy as np

from model.quantization.packed_form import PackedForm, Zeros

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the n-th value of a word belongs to this one of eight neighbouring outputs
_ROWS_AT_ONCE = 256  # rows that are dequantised together; bounds the temporary memory


def unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """i32[..., n] -> u8[..., n * 32 / bits], the lowest bits of each word first. `bits` is 4 or 8."""
    octets = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)
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
        part = values[rows].astype(np.float32)
        part -= 1 << (form.bits - 1) if zeros is None else zeros[rows].astype(np.float32)[:, groups]
        np.multiply(part, scales[rows].astype(np.float32)[:, groups], out=weights[rows])
    return weights
