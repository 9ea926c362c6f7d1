"""The 4-bit form of a kernel: an int4 number for each weight, and for each output and group of inputs a bfloat16 scale.

A weight is `(kernel - zero) * scale`; without zeros, `kernel * scale`. Kernels are `jnp.int4`: two weights in a byte of
a chip's memory, and one in a byte of the host's. Scales are bfloat16, because XLA's GPU compiler dequantises in that
type inside a product.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

LEAST = -8  # of -8 to 7


def quantize_groups(weights: jax.Array, group: int) -> tuple[jax.Array, jax.Array]:
    """weights [out, in] of any float type -> kernel int4[out, in], scale bf16[out, in / group]. Each weight is rounded
    to the nearest multiple of its scale.

    The weight of the largest magnitude in a group becomes -8 (of two, the positive one), so a scale may be negative.
    The other sign has one step less, and its weights beyond that are clipped to 7. A group with a non-finite weight
    gets a non-finite scale.
    """
    grouped = weights.astype(jnp.float32).reshape(weights.shape[0], -1, group)
    high, low = (extreme(grouped, axis=2, keepdims=True) for extreme in (jnp.max, jnp.min))
    scale = (jnp.where(high >= -low, high, low) * (1 / LEAST)).astype(jnp.bfloat16)
    divisor = jnp.where(scale == 0, 1.0, scale.astype(jnp.float32))  # a group of zeros
    steps = jnp.clip(jnp.round(grouped / divisor), LEAST, -LEAST - 1)
    return steps.astype(jnp.int4).reshape(weights.shape), scale[:, :, 0]


def dequantize_groups(kernel: jax.Array, scale: jax.Array, zero: jax.Array | None = None) -> jax.Array:
    """f32[out, in]. `scale` and `zero` are [out, in / group]."""
    values = kernel.astype(jnp.float32).reshape(*scale.shape, -1)
    if zero is not None:
        values = values - zero.astype(jnp.float32)[:, :, None]
    return (values * scale.astype(jnp.float32)[:, :, None]).reshape(kernel.shape)
