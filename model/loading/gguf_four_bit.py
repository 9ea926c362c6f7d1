"""GGUF's 4-bit blocks in the parts of the 4-bit form (`model.network.four_bit`).

In `Q4_0` a block is 32 neighbouring weights with a scale. In `Q4_K` it is eight groups of 32, each with a scale and a
minimum that is subtracted: `scale * value - minimum`. Import this module only for a GGUF file, as `gguf_tensors`.
"""

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import Q4_K

from model.quantization.forms import FourBit

Type = GGMLQuantizationType
_GROUP, _MIDDLE = 32, 8
FOUR_BIT: Mapping[Type, FourBit] = {
    Type.Q4_0: FourBit(group=_GROUP),
    Type.Q4_K: FourBit(group=_GROUP, has_zeros=True),
}


def four_bit_part(name: str, type: Type, stored: np.ndarray, first: int, end: int) -> np.ndarray:
    """The columns from `first` to `end` of a tensor of the 4-bit form: "kernel" -> i8[out, in]; "scale" or "zero" ->
    f32[out, in / 32].

    A zero is in units of the scale as the 4-bit form rounds it, so that the rounding of the scale does not move it.

    Args:
        stored: u8[out, blocks, bytes], whole rows. First and end are multiples of 32.
    """
    per_block, _ = GGML_QUANT_SIZES[type]
    first_block, end_block = first // per_block, -(-end // per_block)
    blocks = np.array(stored[:, first_block:end_block])
    values, scale, minimum = (_q4_0 if type == Type.Q4_0 else _q4_k)(blocks)
    within = slice((first - first_block * per_block) // _GROUP, (end - first_block * per_block) // _GROUP)
    values, scale, minimum = values[:, within], scale[:, within], minimum[:, within]
    # A group of one value may have a minimum only: its values become 0, and its zero 1 of a scale that is the minimum.
    is_flat = scale.astype(ml_dtypes.bfloat16) == 0
    scale = np.where(is_flat, minimum, scale)
    if name == "scale":
        return scale
    if name == "zero":
        rounded = scale.astype(ml_dtypes.bfloat16).astype(np.float32)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(is_flat, np.float32(minimum != 0), minimum / rounded - _MIDDLE)
    kernel = np.where(is_flat[:, :, None], 0, values.astype(np.int8) - _MIDDLE).astype(np.int8)
    return kernel.reshape(len(kernel), -1)


Parts = tuple[np.ndarray, np.ndarray, np.ndarray]  # u8[out, groups, 32], f32[out, groups], f32[out, groups]


def _q4_0(blocks: np.ndarray) -> Parts:
    """2 bytes of a float16 scale, then 16 bytes: the low halves are the first 16 values. The zero is 8."""
    scale = _float16(blocks[:, :, :2])
    return _nibbles(blocks[:, :, 2:]), scale, np.zeros_like(scale)


def _q4_k(blocks: np.ndarray) -> Parts:
    """4 bytes of the float16 units of scales and minima, 12 bytes of eight 6-bit scales and minima, then four times 32
    bytes: the low halves are one group, the high halves the next."""
    num_out, num_blocks, _ = blocks.shape
    scales, minima = Q4_K.get_scale_min(blocks[:, :, 4:16].reshape(-1, 12))
    shape = (num_out, num_blocks, 8)
    scale = _float16(blocks[:, :, :2])[:, :, None] * scales.reshape(shape).astype(np.float32)
    minimum = _float16(blocks[:, :, 2:4])[:, :, None] * minima.reshape(shape).astype(np.float32)
    values = _nibbles(blocks[:, :, 16:].reshape(num_out, -1, 32)).reshape(num_out, -1, _GROUP)
    return values, scale.reshape(num_out, -1), minimum.reshape(num_out, -1)


def _float16(octets: np.ndarray) -> np.ndarray:
    """u8[.., 2] -> f32[..]"""
    return np.ascontiguousarray(octets).view("<f2")[..., 0].astype(np.float32)


def _nibbles(octets: np.ndarray) -> np.ndarray:
    """u8[.., n] -> u8[.., 2 n]: all low halves, then all high halves."""
    return np.concatenate([octets & 15, octets >> 4], axis=-1)
