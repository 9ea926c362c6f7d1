"""One vector for each row of a step, from the hidden states of its tokens.

Shape legend: `T` tokens of the step (padded), `S` rows (padded), `D` embed.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from batcher.request import Pooling


def pool(hidden: jax.Array, starts: jax.Array, pooling: Pooling) -> jax.Array:
    """f32[S, D]: the hidden state of each row's last token in the step, or the sum over its tokens.

    Args:
        hidden: [T, D], after the final norm.
        starts: i32[S + 1], where each row's tokens begin; the end of the last.
    """
    if pooling is Pooling.LAST:
        return hidden[jnp.maximum(starts[1:] - 1, 0)].astype(jnp.float32)
    index = jnp.arange(hidden.shape[0], dtype=jnp.int32)
    is_own = (index >= starts[:-1, None]) & (index < starts[1:, None])  # [S, T]
    # As a product, the sums come out in one order, which those of a scatter need not on GPUs. In a product NaN and
    # infinity would reach the other rows, so they are left out, and put into the row that they belong to afterwards.
    is_finite = jnp.isfinite(hidden).all(axis=-1)
    clean = jnp.where(is_finite[:, None], hidden, 0).astype(jnp.float32)
    sums = jnp.matmul(is_own.astype(jnp.float32), clean, precision=lax.Precision.HIGHEST)
    return jnp.where((is_own & ~is_finite).any(axis=1)[:, None], jnp.nan, sums)
