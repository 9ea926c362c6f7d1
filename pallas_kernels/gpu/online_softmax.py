"""Softmax over consecutive blocks of keys: running maximum and sum per row, in base 2, with the scale included.

Source: Milakov and Gimelshein, Online normalizer calculation for softmax (2018), as in FlashAttention.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

LOWEST = -1e30  # the peak before the first key: finite, so that a row without keys does not become NaN


def start(rows: int, head_dim: int, layout: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Accumulator f32[rows, head_dim], peak and total f32[rows] before the first block."""
    return (
        plgpu.layout_cast(jnp.zeros((rows, head_dim), jnp.float32), layout),
        plgpu.layout_cast(jnp.full((rows,), LOWEST, jnp.float32), layout.reduce(1)),
        plgpu.layout_cast(jnp.zeros((rows,), jnp.float32), layout.reduce(1)),
    )


def step(
    scores: jax.Array,  # f32[rows, block_kv], -inf where a row may not see a key
    peak: jax.Array,
    total: jax.Array,
    scale_log2: float,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The block's weights f32[rows, block_kv], the factor f32[rows] of the accumulator, the new peak and total."""
    new_peak = jnp.maximum(peak, scores.max(axis=1) * scale_log2)
    alpha = jnp.exp2(peak - new_peak)
    p = jnp.exp2(scores * scale_log2 - lax.broadcast_in_dim(new_peak, scores.shape, [0]))
    return p, alpha, new_peak, total * alpha + p.sum(axis=1)


def scaled(acc: jax.Array, factors: jax.Array) -> jax.Array:
    """Each row of `acc` times its factor."""
    return acc * lax.broadcast_in_dim(factors, acc.shape, [0])


def finish(acc: jax.Array, peak: jax.Array, total: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The output f32[rows, head_dim], and the log2 of its divisor f32[rows]. A row without keys is zero."""
    safe = jnp.where(total > 0, total, 1.0)
    return acc / lax.broadcast_in_dim(safe, acc.shape, [0]), peak + jnp.log2(safe)
