"""A copy out of Hopper's prefill may begin at any row of a swizzled buffer: a model of who swizzles by what."""

from __future__ import annotations

import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.core import SMEM_ALIGNMENT  # where scratch buffers begin

from pallas_kernels.gpu.attention import HEAD_DIMS
from pallas_kernels.gpu.prefill_tile import TILE_M

CHUNK, PATTERN = 16, 1024  # bytes that stay together, and after which the pattern repeats


def swizzled(place: int) -> int:
    """Of a byte, for a swizzle of 128 bytes: bits 4 to 6 are changed by bits 7 to 9."""
    return place ^ ((place // 128 % 8) * CHUNK)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_rows_come_out_as_they_were_stored_from_any_row_on(head_dim):
    row_bytes, base = 2 * head_dim, 3 * SMEM_ALIGNMENT
    memory = np.full(base + TILE_M * row_bytes, -1)
    for offset in range(0, TILE_M * row_bytes, CHUNK):  # Mosaic swizzles the offset in the buffer
        memory[base + swizzled(offset)] = offset
    for start in range(TILE_M):
        for size in (1, 2, 4, 8):
            if start + size > TILE_M:
                continue
            first = base + start * row_bytes
            places = range(first, first + size * row_bytes, CHUNK)
            copied = [memory[swizzled(place)] for place in places]  # TMA swizzles the address
            assert copied == [place - base for place in places]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_both_warpgroups_buffers_begin_with_the_pattern(head_dim):
    assert SMEM_ALIGNMENT % PATTERN == 0
    assert TILE_M * head_dim * 2 % PATTERN == 0
