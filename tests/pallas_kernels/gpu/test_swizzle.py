"""A copy out of Hopper's prefill may begin at any row of a buffer that begins with the pattern of its swizzle."""

from __future__ import annotations

import pytest
from jax._src.pallas.mosaic_gpu.core import SMEM_ALIGNMENT  # where scratch buffers begin

from pallas_kernels.gpu.attention import HEAD_DIMS
from pallas_kernels.gpu.prefill_tile import TILE_M

PATTERN = 1024  # bytes after which a swizzle of 128 bytes repeats


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_both_warpgroups_buffers_begin_with_the_pattern(head_dim):
    assert SMEM_ALIGNMENT % PATTERN == 0
    assert TILE_M * head_dim * 2 % PATTERN == 0
