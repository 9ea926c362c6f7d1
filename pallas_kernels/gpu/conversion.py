"""Converts tiles of 8-bit keys and values to float16 in shared memory.

The operands of a product must have the same type. Float16 holds every number of both 8-bit types, and from Ada on a
conversion of two fp8 numbers is one instruction. The matrix loads (ldmatrix) and wgmma read 16-bit tiles only, so the
threads load an 8-bit tile to registers, convert it, and store it to a tile of float16.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import matmul

ROWS = 32  # that a warpgroup converts at a time: 8 of each warp
_VECTOR = 8  # elements of one thread: loads of 8 bytes and stores of 16, without bank conflicts

# Each warp has 8 rows. A thread's row is its number modulo 8: the eight threads that access memory together have eight
# rows, which the swizzle puts into different banks.
LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((ROWS, 4 * _VECTOR), (8, 4 * _VECTOR), (_VECTOR,))),
    warp_dims=(-5,),
    lane_dims=(-2, -3),
    vector_dim=-1,
)


def product_dtype(queries_dtype: Any, kv_dtype: Any) -> Any:
    """The type of the products' operands, which is the kernels' type of queries and output, for pages of `kv_dtype`."""
    return jnp.dtype(queries_dtype if jnp.dtype(kv_dtype).itemsize > 1 else jnp.float16)


def converted_tile(shape: tuple[int, ...], dtype: Any) -> Any:
    """The SMEM of a converted tile [keys, H]."""
    return plgpu.SMEM(shape, dtype, transforms=matmul.swizzled(shape[-1], dtype))


def load(tile: Any, dtype: Any) -> jax.Array:
    """The 8-bit tile [keys, H] in registers, as `dtype`. All threads of a warpgroup take part."""
    return plgpu.load(tile, layout=LAYOUT, optimized=False).astype(dtype)


def convert(tile: Any, converted: Any) -> Any:
    """Converts the 8-bit tile [keys, H] to the tile `converted`, which is returned."""
    converted[...] = load(tile, converted.dtype)
    return converted
