"""The distribution of one head's elements over the 128 threads of a warpgroup."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

THREADS, WARPS = 128, 4
WIDEST_STORE = 16  # bytes of one thread


def layout(size: int) -> Any:
    """A vector of `size` elements: a run of them per thread, or, of fewer than 128, the same ones in every warp."""
    if size % THREADS == 0:
        return plgpu.Layout.WG_STRIDED((size,), vec_size=1)
    return plgpu.Layout.TILED(
        plgpu.Tiling(((size,), (size // 32,))), warp_dims=(plgpu.Replicated(4),), lane_dims=(-2,), vector_dim=-1
    )


def rows_together(size: int, itemsize: int) -> int:
    """Rows of `size` elements that the threads store at once with their widest instruction; `rows_layout` needs two a
    warp."""
    return max(2 * WARPS, THREADS * WIDEST_STORE // (itemsize * size))


def rows_layout(rows: int, size: int) -> Any:
    """An array of `rows` rows, a multiple of eight: each thread has neighbouring elements of one row."""
    warp_rows, run = rows // WARPS, rows * size // THREADS
    return plgpu.Layout.TILED(
        plgpu.Tiling(((rows, size), (warp_rows, size), (run,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
    )


def registers(size: int) -> int:
    """Registers of a thread that hold a vector of `size` elements of 32 bits."""
    return size // THREADS if size % THREADS == 0 else size // 32


def head_columns(head: jax.Array, head_dim: int) -> Any:
    """The columns of a head in [T, N * H]."""
    return pl.ds(pl.multiple_of(head * head_dim, head_dim), head_dim)


def load(ref: Any, size: int) -> Any:
    """The vector `ref`, of `size` elements, from GMEM or SMEM."""
    return plgpu.load(ref, layout=layout(size), optimized=size % THREADS == 0)


def load_operand(ref: Any, size: int) -> Any:
    """As `load`, of a vector that is only computed with others that have its `layout`. Mosaic then infers it. A cast is
    one more unknown to guess, and the time to lower a kernel grows with the square of their number."""
    return plgpu.load(ref, optimized=size % THREADS == 0)
