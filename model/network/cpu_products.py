"""Products of a few rows with a kernel, in the forms that XLA's CPU backend runs at the memory's speed.

The streamed form needs `xla_cpu_enable_fast_math` (see `compiler_options`). Without it XLA must keep the order of
additions; the loop is then not vectorised, and slower than a plain product. The speeds are in
`scripts/lab/results/decisions.md`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

MAX_ROWS_FROM_LEFT = 32
STREAMS = 4
MAX_ROWS_INT8_STREAMED = 8
BLOCK_WEIGHTS = 1 << 19  # weights of a block, which takes 2 MiB in float32


def multiply_few(inputs: jax.Array, kernel: jax.Array, out_dtype: Any) -> jax.Array | None:
    """inputs [T, in] times the transpose of kernel [out, in]: [T, out]. None if T is too large for these forms to be
    faster."""
    rows = inputs.shape[0]
    if rows <= max_rows_streamed(kernel.dtype) and kernel.shape[0] % STREAMS == 0:
        return _streamed(inputs, kernel).astype(out_dtype)
    if rows <= MAX_ROWS_FROM_LEFT:
        product = lax.dot_general(kernel, inputs, (((1,), (1,)), ((), ())), preferred_element_type=out_dtype)
        # Without the barrier XLA would swap the operands back to save the transposition.
        return lax.optimization_barrier(product).T
    return None


def multiply_int8(inputs: jax.Array, kernel: jax.Array) -> jax.Array:
    """inputs [T, in] times the transpose of kernel i8[out, in]: f32[T, out], for any T.

    A plain product would first write the whole kernel in float32. This one converts a block at a time; a block fits in
    a core's cache.
    """
    num_out, width = kernel.shape
    if inputs.shape[0] <= MAX_ROWS_INT8_STREAMED and num_out % STREAMS == 0:
        return _streamed(inputs, kernel)
    return _in_blocks(inputs, kernel, max(1, min(num_out, BLOCK_WEIGHTS // width)))


@partial(jax.jit, static_argnums=2)  # traced once for all layers
def _in_blocks(inputs: jax.Array, kernel: jax.Array, block: int) -> jax.Array:
    """The product f32[T, out]. `block` rows of the kernel are converted and multiplied at a time."""
    inputs = inputs.astype(jnp.float32)
    num_blocks, num_out = kernel.shape[0] // block, kernel.shape[0]

    def products(first: jax.Array | int, rows: int) -> jax.Array:
        part = lax.dynamic_slice_in_dim(kernel, first, rows).astype(jnp.float32)
        return lax.dot_general(part, inputs, (((1,), (1,)), ((), ())))  # [rows, T]

    whole = lax.map(lambda i: products(i * block, block), jnp.arange(num_blocks)).reshape(num_blocks * block, -1)
    rest = num_out - num_blocks * block
    return (jnp.concatenate([whole, products(num_out - rest, rest)]) if rest else whole).T


def max_rows_streamed(dtype: Any) -> int:
    """The most rows of inputs for `_streamed`. A small weight takes less time to read, which hides less arithmetic."""
    return 8 if jnp.dtype(dtype).itemsize >= 4 else 2


@jax.jit  # traced once for all layers
def _streamed(inputs: jax.Array, kernel: jax.Array) -> jax.Array:
    """The product f32[T, out], by multiplications and additions. One loop reads `STREAMS` parts of the kernel at the
    same time, which uses more of the memory's bandwidth. It multiplies each weight with every row of the inputs."""
    rows, width = inputs.shape
    parts = kernel.reshape(STREAMS, -1, width).astype(jnp.float32)
    inputs = lax.optimization_barrier(inputs).astype(jnp.float32)  # without it, each output computes them again
    terms = tuple(part * row for part in parts for row in inputs)
    zeros = (np.float32(0),) * len(terms)
    sums = lax.reduce(terms, zeros, lambda a, b: tuple(map(jnp.add, a, b)), (1,))
    sums = jnp.stack(lax.optimization_barrier(sums))  # [STREAMS * T, out / STREAMS]
    return sums.reshape(STREAMS, rows, -1).transpose(1, 0, 2).reshape(rows, -1)
