"""Sums of weights that do not depend on the order of addition: they are equal on one chip and on eight.

Each weight is cut into three integers, and the integers are summed. Sums in float32 depend on the order of their terms,
and the tokens that top_p keeps would depend on it, too.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

BITS = 13  # bits of each of the three integers; the part of a weight below 2**-39 is dropped
MAX_TERMS = 2**19 - 1  # the sum of this many integers of up to 2**13 fits in 32 bits


def cut(weights: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Cuts `weights`, 0 to 1, into three u32 in units of 2**-13, 2**-26 and 2**-39. Each is exact."""
    parts, rest = [], weights
    for _ in range(3):
        scaled = rest * 2.0**BITS
        whole = scaled.astype(jnp.int32)  # a CPU has no conversion to unsigned
        parts.append(whole.astype(jnp.uint32))
        rest = scaled - whole.astype(jnp.float32)
    coarse, middle, fine = parts
    return coarse, middle, fine


def exact_sum(weights: jax.Array) -> jax.Array:
    """The three sums u32[3, ...] over the last axis. The sums of a vocabulary's parts can be added.

    Raises:
        ValueError: there are more than `MAX_TERMS` terms, whose sums might not fit in 32 bits.
    """
    if weights.shape[-1] > MAX_TERMS:
        raise ValueError(f"exact sums have at most {MAX_TERMS} terms: {weights.shape=}")
    # A TPU computes three reductions in one pass as well, and its compiler takes half as long for them.
    return lax.platform_dependent(weights, tpu=_in_three_sums, default=_in_one_sum)


def _in_three_sums(weights: jax.Array) -> jax.Array:
    return jnp.stack([jnp.sum(part, axis=-1, dtype=jnp.uint32) for part in cut(weights)])


def _in_one_sum(weights: jax.Array) -> jax.Array:
    """The sums by one reduction of three operands. Each of three separate reductions would read the weights."""
    zeros = (jnp.uint32(0),) * 3
    return jnp.stack(lax.reduce(cut(weights), zeros, lambda x, y: tuple(map(lax.add, x, y)), (weights.ndim - 1,)))


def as_float(sums: jax.Array) -> jax.Array:
    """The sums u32[3, ...] as f32[...], rounded. A greater sum never gives a smaller float."""
    high, middle, low = sums
    middle = middle + (low >> BITS)
    high = high + (middle >> BITS)
    rest = ((middle & (2**BITS - 1)) << BITS) + (low & (2**BITS - 1))
    return high.astype(jnp.float32) * 2.0**-BITS + rest.astype(jnp.float32) * 2.0 ** (-3 * BITS)
