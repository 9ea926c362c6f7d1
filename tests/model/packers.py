"""Writers of packed checkpoints, from the descriptions of the formats: word by word, in Python's own integers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Quantized:
    """A kernel [out, in] in few bits: its weights are (values - zeros) * scales, of the group of each input."""

    bits: int
    values: np.ndarray  # [out, in]
    zeros: np.ndarray  # [out, n]
    scales: np.ndarray  # f16[out, n]
    groups: np.ndarray  # [in]

    def weights(self) -> np.ndarray:
        scales = self.scales.astype(np.float32)[:, self.groups]
        return (self.values - self.zeros[:, self.groups]).astype(np.float32) * scales


def quantized(weights: np.ndarray, *, bits: int, group: int, symmetric: bool, order=None) -> Quantized:
    """Rounded to nearest. `order`: a permutation of the inputs, of which neighbours share a group; by default none."""
    num_inputs, top = weights.shape[1], (1 << bits) - 1
    groups = np.empty(num_inputs, np.int64)
    groups[np.arange(num_inputs) if order is None else order] = np.arange(num_inputs) // group
    zeros, scales = [], []
    for number in range(groups.max() + 1):
        part = weights[:, groups == number]
        low, high = np.minimum(part.min(axis=1), 0), np.maximum(part.max(axis=1), 0)
        span = 2 * np.maximum(-low, high) if symmetric else high - low
        scale = (np.where(span == 0, 1, span) / top).astype(np.float16)
        scales.append(scale)
        middle = np.full(len(part), 1 << (bits - 1))
        zeros.append(middle if symmetric else np.rint(-low / scale.astype(np.float32)).astype(np.int64))
    zeros, scales = np.clip(np.stack(zeros, axis=1), 0, top), np.stack(scales, axis=1)
    steps = np.rint(weights / scales.astype(np.float32)[:, groups])
    return Quantized(bits, np.clip(steps + zeros[:, groups], 0, top).astype(np.int64), zeros, scales, groups)


def words(matrix: np.ndarray, bits: int, axis: int, order=None) -> np.ndarray:
    """i32, each word of 32 / bits neighbours along an axis; `order` says which neighbour each place in a word holds."""
    per_word = 32 // bits
    lines = np.moveaxis(matrix, axis, -1)
    lines = np.pad(lines, [(0, 0), (0, -lines.shape[-1] % per_word)])
    packed = np.zeros((lines.shape[0], lines.shape[1] // per_word), np.uint32)
    for row, line in enumerate(lines.tolist()):
        for word in range(packed.shape[1]):
            held = line[word * per_word : (word + 1) * per_word]
            packed[row, word] = sum(held[n] << (bits * i) for i, n in enumerate(order or range(per_word)))
    return np.ascontiguousarray(np.moveaxis(packed, -1, axis)).view(np.int32)


def gptq(kernel: Quantized, *, version: int = 1) -> dict[str, np.ndarray]:
    qzeros = words(kernel.zeros.T, kernel.bits, axis=1)
    if version == 1:  # as words: GPTQModel's writer borrows where a zero is 0
        ones = np.uint32(sum(1 << shift for shift in range(0, 32, kernel.bits)))
        qzeros = (qzeros.view(np.uint32) - ones).view(np.int32)
    return {
        "qweight": words(kernel.values.T, kernel.bits, axis=0),
        "qzeros": qzeros,
        "scales": np.ascontiguousarray(kernel.scales.T),
        "g_idx": kernel.groups.astype(np.int32),
    }


def awq(kernel: Quantized) -> dict[str, np.ndarray]:
    return {
        "qweight": words(kernel.values.T, 4, axis=1, order=AWQ_ORDER),
        "qzeros": words(kernel.zeros.T, 4, axis=1, order=AWQ_ORDER),
        "scales": np.ascontiguousarray(kernel.scales.T),
    }


def compressed_tensors(kernel: Quantized, *, symmetric: bool, ordered: bool = False) -> dict[str, np.ndarray]:
    parts = {
        "weight_packed": words(kernel.values, kernel.bits, axis=1),
        "weight_scale": kernel.scales,
        "weight_shape": np.array(kernel.values.shape, np.int64),
    }
    parts |= {} if symmetric else {"weight_zero_point": words(kernel.zeros, kernel.bits, axis=0)}
    return parts | ({"weight_g_idx": kernel.groups.astype(np.int32)} if ordered else {})
