"""Packs samples one after the other into rows of equal length. A sample attends only to itself."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Encoded = tuple[list[int], list[float]]  # ids, weight of predicting each

MAX_MISSES = 8  # samples tried for the end of a row; then the rest of the row stays empty


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """`B` rows of `R` tokens. Position t predicts targets[t]."""

    tokens: np.ndarray  # i32[B, R]
    targets: np.ndarray  # i32[B, R]
    weights: np.ndarray  # f32[B, R], loss weights; 0 in padding
    positions: np.ndarray  # i32[B, R], within the token's sample
    samples: np.ndarray  # i32[B, R], number of the token's sample in the row; 0 is padding


def pack(
    rng: random.Random,
    draw: Callable[[random.Random], Encoded],
    *,
    num_rows: int,
    row_length: int,
    filler: Callable[[random.Random], Encoded] | None = None,
) -> PackedBatch:
    """Fills rows with samples of `draw`. A sample that does not fit in the rest of a row goes to the next row; shorter
    samples, from `filler` if given, take its place. A sample that is longer than a row is truncated."""
    shape = (num_rows, row_length)
    tokens, targets, positions, samples = (np.zeros(shape, np.int32) for _ in range(4))
    weights = np.zeros(shape, np.float32)
    waiting: list[Encoded] = []
    for row in range(num_rows):
        start, number, misses = 0, 0, 0
        while start < row_length and misses < MAX_MISSES:
            room = row_length - start
            if number == 0 and waiting:
                ids, weight = waiting.pop(0)
            else:
                ids, weight = (filler if misses and filler is not None else draw)(rng)
            if len(ids) - 1 > room and number > 0:
                misses += 1
                if misses == 1:
                    waiting.append((ids, weight))
                continue
            length = min(len(ids) - 1, room)
            here = slice(start, start + length)
            number += 1
            tokens[row, here] = ids[:length]
            targets[row, here] = ids[1 : length + 1]
            weights[row, here] = weight[1 : length + 1]
            positions[row, here] = np.arange(length)
            samples[row, here] = number
            start += length
    return PackedBatch(tokens=tokens, targets=targets, weights=weights, positions=positions, samples=samples)
