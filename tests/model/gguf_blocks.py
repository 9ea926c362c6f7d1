"""GGML's blocks, decoded value by value from the description of the format, in float32 without fused operations.

The layouts: `ggml-common.h` of https://github.com/ggml-org/ggml.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping

import numpy as np
from gguf import GGMLQuantizationType as Type

F32 = np.float32
_NON_LINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # of IQ4


def half(block: bytes, at: int) -> np.float32:
    return F32(struct.unpack_from("<e", block, at)[0])


def nibbles(octets: bytes) -> list[int]:
    """All low halves, then all high halves."""
    return [octet & 15 for octet in octets] + [octet >> 4 for octet in octets]


def with_fifth_bit(block: bytes, at: int) -> list[int]:
    """Four bytes of fifth bits, then the low four bits."""
    (high,) = struct.unpack_from("<I", block, at)
    return [low | (high >> i & 1) << 4 for i, low in enumerate(nibbles(block[at + 4 :]))]


def q4_1(block: bytes) -> list[np.float32]:
    return [half(block, 0) * F32(value) + half(block, 2) for value in nibbles(block[4:])]


def q5_0(block: bytes) -> list[np.float32]:
    return [half(block, 0) * F32(value - 16) for value in with_fifth_bit(block, 2)]


def q5_1(block: bytes) -> list[np.float32]:
    return [half(block, 0) * F32(value) + half(block, 2) for value in with_fifth_bit(block, 4)]


def iq4_nl(block: bytes) -> list[np.float32]:
    return [half(block, 0) * F32(_NON_LINEAR[value]) for value in nibbles(block[2:])]


def iq4_xs(block: bytes) -> list[np.float32]:
    """Eight groups of 32; a scale of six bits has its low four in `block[4:8]`, and its high two in `block[2:4]`."""
    (high,) = struct.unpack_from("<H", block, 2)
    values = []
    for group in range(8):
        low = block[4 + group // 2] >> 4 * (group % 2) & 15
        scale = half(block, 0) * F32((low | (high >> 2 * group & 3) << 4) - 32)
        values += [scale * F32(_NON_LINEAR[value]) for value in nibbles(block[8 + 16 * group : 24 + 16 * group])]
    return values


def two_bits(octets: bytes) -> Iterator[tuple[int, int]]:
    """The values of 64 bytes in order, each with the number of its byte among 32: every 32 bytes hold four times 32."""
    for start in (0, 32):
        for shift in (0, 2, 4, 6):
            yield from ((octets[start + i] >> shift & 3, i) for i in range(32))


def q2_k(block: bytes) -> list[np.float32]:
    """Sixteen groups of 16, each with a scale and a minimum of four bits."""
    values = []
    for place, (value, _) in enumerate(two_bits(block[16:80])):
        packed = block[place // 16]
        values.append(half(block, 80) * F32(packed & 15) * F32(value) - half(block, 82) * F32(packed >> 4))
    return values


def q3_k(block: bytes) -> list[np.float32]:
    """A third bit in `block[:32]`, whose absence subtracts 4; sixteen scales of six bits in `block[96:108]`."""
    values = []
    for place, (value, i) in enumerate(two_bits(block[32:96])):
        group = place // 16
        low = block[96 + group % 8] >> 4 * (group // 8) & 15
        high = block[104 + group % 4] >> 2 * (group // 4) & 3
        third = block[i] >> place // 32 & 1
        values.append(half(block, 108) * F32((low | high << 4) - 32) * F32(value - 4 * (1 - third)))
    return values


def q6_k(block: bytes) -> list[np.float32]:
    """Sixteen groups of 16, each with a scale in a signed byte, `block[192:208]`. Each half of the values has its lower
    four bits in 64 bytes, and its upper two in 32 bytes after all of these."""
    values = []
    for place in range(256):
        part, i = divmod(place, 128)
        low = block[64 * part + i % 64] >> 4 * (i // 64) & 15
        high = block[128 + 32 * part + i % 32] >> 2 * (i // 32) & 3
        (scale,) = struct.unpack_from("<b", block, 192 + place // 16)
        values.append(half(block, 208) * F32(scale) * F32((low | high << 4) - 32))
    return values


DECODERS: Mapping[Type, Callable[[bytes], list[np.float32]]] = {
    Type.Q4_1: q4_1,
    Type.Q5_0: q5_0,
    Type.Q5_1: q5_1,
    Type.IQ4_NL: iq4_nl,
    Type.IQ4_XS: iq4_xs,
    Type.Q2_K: q2_k,
    Type.Q3_K: q3_k,
    Type.Q6_K: q6_k,
}
