"""The matrix products of the kernels, and their replacements in interpret mode.

The interpreter does not support `mma`, and the race detector does not see the reads of its `wgmma`. In interpret mode,
both are therefore plain loads and a plain dot product, so a missing barrier before a product is found as a race. This
does not check fragment layouts, or the asynchrony of products on the chip. Compile-only tests check the layouts, and
only a run on the chip checks its numbers.

`mma` takes registers: threads read its operands from shared memory through the generic proxy, and the callers fence
these reads from later copies (`ring`). `wgmma` reads shared memory through the async proxy, by which TMA writes it, and
needs no fence on the chip. Its replacement reads through the generic proxy, and contains the fence.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

TILE_ROWS = 8  # of the swizzled form that TMA writes and the tensor cores read
WARPS = 4  # warps of a warpgroup


def mma(acc: jax.Array, lhs: jax.Array, rhs: jax.Array, *, interpret: Any) -> jax.Array:
    """acc + lhs @ rhs, with operands in registers; float32 accumulation."""
    if interpret is None:
        return plgpu.mma(acc, lhs, rhs)
    return acc + jnp.dot(lhs, rhs, preferred_element_type=jnp.float32)


def swizzled(columns: int, dtype: Any, *, copied_rows: int | None = None) -> tuple[Any, ...]:
    """Transforms of an SMEM tile with `columns` in its last axis: for TMA, ldmatrix, wgmma, without bank conflicts.

    `copied_rows`: the rows that one cp.async copies, if it is used. It distributes 8-row tiles over four warps, so a
    small copy needs narrower tiles (and then has some bank conflicts).
    """
    itemsize = jnp.dtype(dtype).itemsize
    width = min(128, columns * itemsize)
    if copied_rows is not None:
        while (copied_rows // TILE_ROWS) * (columns * itemsize // width) % WARPS:
            width //= 2
    tiling = plgpu.TilingTransform((TILE_ROWS, width // itemsize))  # type: ignore[abstract]  # jax makes them, too
    return tiling, plgpu.SwizzleTransform(width)  # type: ignore[abstract]


def rows_before(count: Any, shape: tuple[int, ...], layout: Any) -> jax.Array:
    """bool[rows, columns] in the layout of a product's right operand: whether the row is one of the first `count`.

    The numbers are those of one column, spread over the others. A `broadcasted_iota` of the whole shape would be wrong:
    a thread has pairs of rows of one column, and jax (0.11.2) numbers both as the first of them.
    """
    row = plgpu.broadcasted_iota(jnp.int32, shape[:1], 0, layout=layout.reduce(1))
    # A thread's rows differ in other bits than those of 6, which are its place: the compiler is left with constants on
    # the one side and with one register on the other.
    before = (row & ~6) < count - (row & 6)
    return lax.broadcast_in_dim(before, shape, [0])


def start_wgmma(acc_ref: Any, lhs: Any, rhs: Any, *, interpret: Any) -> None:
    """Starts acc += lhs @ rhs, with `rhs` in SMEM and `lhs` in SMEM or in registers. It ends at the next `result`."""
    if interpret is None:
        plgpu.wgmma(acc_ref, lhs, rhs)
        return
    left = lhs if isinstance(lhs, jax.Array) else lhs[...]
    acc_ref[...] += jnp.dot(left, rhs[...], preferred_element_type=jnp.float32)


def result(acc_ref: Any, *, interpret: Any) -> jax.Array:
    """Waits for all products, and returns the accumulator. ptxas would serialise products if one still ran after it."""
    if interpret is not None:
        return acc_ref[...]
    value = plgpu.wgmma_accumulator_load(acc_ref)
    return lax.optimization_barrier(value)  # nothing that reads it comes before the wait


def read_until_here(acc_ref: Any, *operands: Any, interpret: Any) -> None:
    """Reads the operands in SMEM again, in the interpreter only, where a product has ended. On the chip, the product
    reads them at any time until then, so the race detector must see reads until here."""
    if interpret is None:
        return
    acc_ref[...] = lax.optimization_barrier((acc_ref[...], *(operand[...] for operand in operands)))[0]
    plgpu.commit_smem()
