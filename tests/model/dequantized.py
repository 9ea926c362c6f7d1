"""What the quantised forms of a kernel mean, in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def dequantize(kernel: jax.Array, scale: jax.Array) -> jax.Array:
    """f32[out, in]"""
    return kernel.astype(jnp.float32) * scale[:, None]


def dequantize_groups(kernel: jax.Array, scale: jax.Array, zero: jax.Array | None = None) -> jax.Array:
    """f32[out, in]. `scale` and `zero` are [out, in / group]."""
    values = kernel.astype(jnp.float32).reshape(*scale.shape, -1)
    if zero is not None:
        values = values - zero.astype(jnp.float32)[:, :, None]
    return (values * scale.astype(jnp.float32)[:, :, None]).reshape(kernel.shape)
