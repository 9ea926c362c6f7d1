"""The distribution of one head's elements over the 128 threads of a warpgroup."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

THREADS, WARPS = 128, 4
WIDEST_STORE = 16  # bytes of one thread


def layout(size: int) -> Any:
    """The layout of a vector of `size` elements. If `size` is a multiple of 128, it is divided over all threads;
    otherwise every warp has all elements."""
    if size % THREADS == 0:
        return plgpu.Layout.WG_STRIDED((size,), vec_size=1)
    return plgpu.Layout.TILED(
        plgpu.Tiling(((size,), (size // 32,))), warp_dims=(plgpu.Replicated(4),), lane_dims=(-2,), vector_dim=-1
    )


def rows_together(size: int, itemsize: int) -> int:
    """The number of rows of `size` elements that the threads store with one widest instruction each. It is at least two
    per warp, which `rows_layout` needs."""
    return max(2 * WARPS, THREADS * WIDEST_STORE // (itemsize * size))


def rows_layout(rows: int, size: int) -> Any:
    """The layout of an array of `rows` rows, a multiple of eight. Each thread has neighbouring elements of one row."""
    warp_rows, run = rows // WARPS, rows * size // THREADS
    return plgpu.Layout.TILED(
        plgpu.Tiling(((rows, size), (warp_rows, size), (run,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
    )


def registers(size: int) -> int:
    """The number of registers of a thread that hold its elements of a vector of `size` elements of 32 bits."""
    return size // THREADS if size % THREADS == 0 else size // 32


def head_columns(head: jax.Array, head_dim: int) -> Any:
    """The columns of a head in [T, N * H]."""
    return pl.ds(pl.multiple_of(head * head_dim, head_dim), head_dim)


def load(ref: Any, size: int) -> Any:
    """Loads the vector `ref` of `size` elements from GMEM or SMEM."""
    return plgpu.load(ref, layout=layout(size), optimized=size % THREADS == 0)


def load_operand(ref: Any, size: int) -> Any:
    """Loads the vector `ref` of `size` elements without a stated layout. All vectors that are computed with it must
    have its `layout`, so that Mosaic infers it. A cast would be one more unknown layout, and the time to lower a kernel
    grows with the square of their number."""
    return plgpu.load(ref, optimized=size % THREADS == 0)
