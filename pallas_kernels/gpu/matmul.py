"""The matrix products of the kernels, and their stand-ins for interpret mode.

The interpreter has no rule for `mma`, and the race detector does not see the reads of its `wgmma`. In interpret mode
both are therefore plain loads and a plain dot product, so a missing barrier before a product is found as a race. This
does not check fragment layouts, or the asynchrony of products on the chip. Besides interpreted tests, compile-only
tests (layouts) and a run on the chip (numbers) are needed.

`mma` takes registers: threads read its operands from shared memory through the generic proxy, and the callers fence
those reads from later copies (see `ring`). `wgmma` reads shared memory through the async proxy, by which TMA writes it,
and needs no fence on the chip. Only its stand-in reads through the generic proxy, and has the fence itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

TILE_ROWS = 8  # of the swizzled form that TMA writes and the tensor cores read
WARPS = 4  # of a warpgroup


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


def wgmma_scores(q_smem: Any, k_smem: Any, *, while_running: Callable[[], None], interpret: Any) -> jax.Array:
    """q @ k.T of two SMEM tiles, f32[64, block_kv]; `while_running` is called after the product was issued."""
    if interpret is not None:
        scores = jnp.dot(q_smem[...], k_smem[...].T, preferred_element_type=jnp.float32)
        plgpu.commit_smem()
        while_running()
        return scores

    def product(acc_ref: Any) -> jax.Array:
        plgpu.wgmma(acc_ref, q_smem, k_smem.transpose((1, 0)))
        while_running()
        return acc_ref[...]

    return pl.run_scoped(product, plgpu.ACC((q_smem.shape[0], k_smem.shape[0]), jnp.float32))


def wgmma_accumulate(acc: jax.Array, p: jax.Array, v_smem: Any, *, interpret: Any) -> jax.Array:
    """acc + p @ v, with p in registers and v in SMEM."""
    if interpret is not None:
        acc = acc + jnp.dot(p, v_smem[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()
        return acc
    return pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, p, v_smem))(plgpu.ACC.init(acc))
