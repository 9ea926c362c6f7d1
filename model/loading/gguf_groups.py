"""GGUF's blocks of 4 and 6 bits in the parameters of the forms with scales of groups (`model.network.four_bit`,
`model.network.six_bit`).

In `Q4_0` and `Q4_1` a block is 32 neighbouring weights with a scale, in `Q4_1` also with a minimum that is added. In
`Q4_K` it is eight groups of 32, each with a scale and a minimum that is subtracted: `scale * value - minimum`.

In `Q6_K` a block is sixteen groups of 16: 128 bytes of lower halves, 64 bytes of upper bits, a signed byte for each
group's scale, and the float16 unit of the scales. Each half of the weights has one half of the first bytes and of the
second. Import this module only for a GGUF file, as `gguf_tensors`.
"""

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import Q4_K

from model.quantization.forms import FourBit, ScaleFormat, SixBit, WeightForm

Type = GGMLQuantizationType
_GROUP, _MIDDLE = 32, 8
_SHIFTS = np.arange(0, 8, 2, dtype=np.uint8)
FOUR_BIT: Mapping[Type, FourBit] = {
    Type.Q4_0: FourBit(group=_GROUP),
    Type.Q4_K: FourBit(group=_GROUP, has_zeros=True),
}
EXACT: Mapping[Type, WeightForm] = {
    Type.Q4_0: FourBit(group=_GROUP, numbers=ScaleFormat.FLOAT16),
    Type.Q4_1: FourBit(group=_GROUP, numbers=ScaleFormat.Q4_1),
    Type.Q4_K: FourBit(group=_GROUP, numbers=ScaleFormat.Q4_K),
    Type.Q6_K: SixBit(),
}


def kept_part(form: WeightForm, name: str, type: Type, stored: np.ndarray, first: int, end: int) -> np.ndarray:
    """The columns from `first` to `end` of the parameter `name` of a kernel in `form`, which `FOUR_BIT` or `EXACT` has
    for this type.

    Args:
        stored: u8[out, blocks, bytes], whole rows. First and end are multiples of the inputs of a number.
    """
    if form == FOUR_BIT.get(type):
        return _chip_part(name, type, stored, first, end)
    return (_six_bit_part if type == Type.Q6_K else _exact_part)(name, type, stored, first, end)


def _chip_part(name: str, type: Type, stored: np.ndarray, first: int, end: int) -> np.ndarray:
    """A tensor of a form in `FOUR_BIT`: "kernel" -> i8[out, in]; "scale" or "zero" -> f32[out, in / 32].

    A zero is in units of the scale as the 4-bit form rounds it, so that the rounding of the scale does not move it.
    """
    blocks, within = _blocks_of(type, stored, first, end)
    groups = slice(within.start // _GROUP, within.stop // _GROUP)
    values = _values(type, blocks)[:, within].reshape(len(blocks), -1, _GROUP)
    scale, minimum = (numbers[:, groups] for numbers in (_q4_0 if type == Type.Q4_0 else _q4_k)(blocks))
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


def _exact_part(name: str, type: Type, stored: np.ndarray, first: int, end: int) -> np.ndarray:
    """A tensor of a 4-bit form in `EXACT`: "kernel" -> i8[out, in]; others as they are stored, [out, in / 32] or, of
    units, [out, in / 256]."""
    blocks, within = _blocks_of(type, stored, first, end)
    if name == "kernel":
        return _values(type, blocks)[:, within].astype(np.int8) - np.int8(_MIDDLE)
    if type != Type.Q4_K:
        at = 0 if name == "scale" else 2
        numbers = _half_of(blocks[:, :, at : at + 2])
        return numbers if name == "scale" else -numbers  # the format adds its minimum
    if name.endswith("_unit"):
        at = 0 if name == "scale_unit" else 2
        return _half_of(blocks[:, :, at : at + 2])
    both = Q4_K.get_scale_min(blocks[:, :, 4:16].reshape(-1, 12))
    groups = slice(within.start // _GROUP, within.stop // _GROUP)
    return both[name != "scale"].reshape(len(blocks), -1)[:, groups]


def _six_bit_part(name: str, type: Type, stored: np.ndarray, first: int, end: int) -> np.ndarray:
    """A tensor of the 6-bit form: "kernel" -> i8[out, in], "kernel_upper" -> u8[out, in / 4], "scale" -> i8[out, in /
    16], "scale_unit" -> f16[out, in / 256]."""
    blocks, within = _blocks_of(type, stored, first, end)
    shape = *blocks.shape[:2], 2  # the halves of a block
    if name == "kernel":
        octets = blocks[:, :, :128].reshape(*shape, 1, 64)
        lower = np.concatenate([octets & 15, octets >> 4], axis=3).reshape(len(blocks), -1)
        return lower[:, within].astype(np.int8) - np.int8(_MIDDLE)
    if name == "kernel_upper":  # the first bits of 32 bytes are those of 32 neighbours, and the next ones follow them
        octets = blocks[:, :, 128:192].reshape(*shape, 1, 32)
        upper = (octets >> _SHIFTS[:, None] & 3).reshape(len(blocks), -1)[:, within]
        return np.bitwise_or.reduce(upper.reshape(len(blocks), -1, 4) << _SHIFTS, axis=2)
    if name == "scale":
        groups = slice(within.start // SixBit.group, within.stop // SixBit.group)
        return blocks[:, :, 192:208].reshape(len(blocks), -1)[:, groups].view(np.int8)
    return _half_of(blocks[:, :, 208:210])


def _blocks_of(type: Type, stored: np.ndarray, first: int, end: int) -> tuple[np.ndarray, slice]:
    """The blocks of these columns, u8[out, blocks, bytes], and the columns' place in them."""
    per_block, _ = GGML_QUANT_SIZES[type]
    first_block, end_block = first // per_block, -(-end // per_block)
    start = first - first_block * per_block
    return np.array(stored[:, first_block:end_block]), slice(start, start + end - first)


def _values(type: Type, blocks: np.ndarray) -> np.ndarray:
    """u8[out, in], from 0 to 15. In all three types they are a block's last bytes. The low halves of 16 bytes, of 32 in
    `Q4_K`, are neighbours, and the high halves follow them."""
    per_block, num_bytes = GGML_QUANT_SIZES[type]
    octets = blocks[:, :, num_bytes - per_block // 2 :]
    halves = octets.reshape(len(blocks), -1, 1, 32 if type == Type.Q4_K else 16)
    return np.concatenate([halves & 15, halves >> 4], axis=2).reshape(len(blocks), -1)


def _q4_0(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """f32[out, groups] each: 2 bytes of a float16 scale; the minimum is 0, since the zero is 8."""
    scale = _float16(blocks[:, :, :2])
    return scale, np.zeros_like(scale)


def _q4_k(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """f32[out, groups] each: 4 bytes of the float16 units of scales and minima, 12 bytes of eight 6-bit scales and
    minima."""
    num_out, num_blocks, _ = blocks.shape
    scales, minima = Q4_K.get_scale_min(blocks[:, :, 4:16].reshape(-1, 12))
    shape = (num_out, num_blocks, 8)
    scale = _float16(blocks[:, :, :2])[:, :, None] * scales.reshape(shape).astype(np.float32)
    minimum = _float16(blocks[:, :, 2:4])[:, :, None] * minima.reshape(shape).astype(np.float32)
    return scale.reshape(num_out, -1), minimum.reshape(num_out, -1)


def _float16(octets: np.ndarray) -> np.ndarray:
    """u8[.., 2] -> f32[..]"""
    return _half_of(octets).astype(np.float32)


def _half_of(octets: np.ndarray) -> np.ndarray:
    """u8[.., 2] -> f16[..]"""
    return np.ascontiguousarray(octets).view("<f2")[..., 0]
