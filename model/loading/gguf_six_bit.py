"""GGUF's `Q6_K` in the parameters of the 6-bit form (`model.network.six_bit`).

A block is sixteen groups of 16 neighbouring weights: 128 bytes of lower halves, 64 bytes of upper bits, a signed byte
for the scale of each group, and the float16 unit of the scales. Each half of the weights has one half of the first
bytes and of the second.
"""

from __future__ import annotations

import numpy as np
from gguf.constants import GGMLQuantizationType

from model.loading.gguf_four_bit import blocks_of, half_of
from model.quantization.forms import SixBit

Type = GGMLQuantizationType
_MIDDLE = np.int8(8)
_SHIFTS = np.arange(0, 8, 2, dtype=np.uint8)


def six_bit_part(name: str, type: Type, stored: np.ndarray, first: int, end: int) -> np.ndarray:
    """The columns from `first` to `end` of a parameter: "kernel" -> i8[out, in], "kernel_upper" -> u8[out, in / 4],
    "scale" -> i8[out, in / 16], "scale_unit" -> f16[out, in / 256].

    Args:
        stored: u8[out, blocks, 210], whole rows. First and end are multiples of the inputs of a number.
    """
    blocks, within = blocks_of(type, stored, first, end)
    shape = *blocks.shape[:2], 2  # the halves of a block
    if name == "kernel":
        octets = blocks[:, :, :128].reshape(*shape, 1, 64)
        lower = np.concatenate([octets & 15, octets >> 4], axis=3).reshape(len(blocks), -1)
        return lower[:, within].astype(np.int8) - _MIDDLE
    if name == "kernel_upper":  # the first bits of 32 bytes are those of 32 neighbours, and the next ones follow them
        octets = blocks[:, :, 128:192].reshape(*shape, 1, 32)
        upper = (octets >> _SHIFTS[:, None] & 3).reshape(len(blocks), -1)[:, within]
        return np.bitwise_or.reduce(upper.reshape(len(blocks), -1, 4) << _SHIFTS, axis=2)
    if name == "scale":
        groups = slice(within.start // SixBit.group, within.stop // SixBit.group)
        return blocks[:, :, 192:208].reshape(len(blocks), -1)[:, groups].view(np.int8)
    return half_of(blocks[:, :, 208:210])
