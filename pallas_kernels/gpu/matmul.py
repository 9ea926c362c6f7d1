"""Matrix products as the kernels write them, and their stand-ins for interpret mode.

The interpreter has no rule for `mma`, and its `wgmma` reads operands without telling the race detector. In interpret
mode both are therefore plain loads and a plain dot product: then a missing barrier in front of a product is a race that
is found. What this cannot show: fragment layouts, and that products on the chip are asynchronous. Compile-only tests
(layouts) and a run on the chip (numbers) must stand beside every interpreted test.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

TILE_ROWS = 8  # of the swizzled form that TMA writes and the tensor cores read


def mma(acc: jax.Array, lhs: jax.Array, rhs: jax.Array, *, interpret: Any) -> jax.Array:
    """acc + lhs @ rhs, with operands in registers; float32 accumulation."""
    if interpret is None:
        return plgpu.mma(acc, lhs, rhs)
    return acc + jnp.dot(lhs, rhs, preferred_element_type=jnp.float32)


def swizzled(columns: int, dtype: Any) -> tuple[Any, ...]:
    """Transforms of an SMEM tile with `columns` in its last axis, for TMA, ldmatrix and wgmma without bank conflicts."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = min(128, columns * itemsize)
    return plgpu.TilingTransform((TILE_ROWS, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle)
