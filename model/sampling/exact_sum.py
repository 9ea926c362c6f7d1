"""Sums of weights that do not depend on the order of addition: they are equal on one chip and on eight.

A weight is cut into three integers, and integers are summed. Sums in float32 would depend on the order of the terms,
and with them the tokens that top_p keeps.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

BITS = 13  # of each of the three. What is left of a weight below 2**-39 is not counted
MAX_TERMS = 2**19 - 1  # 2**13 times as many just fit in 32 bits


def cut(weights: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`weights`, 0 to 1, in units of 2**-13, what is left in units of 2**-26, and of 2**-39: u32 each, all exact."""
    parts, rest = [], weights
    for _ in range(3):
        scaled = rest * 2.0**BITS
        whole = scaled.astype(jnp.int32)  # a CPU has no instruction for unsigned ones
        parts.append(whole.astype(jnp.uint32))
        rest = scaled - whole.astype(jnp.float32)
    coarse, middle, fine = parts
    return coarse, middle, fine


def exact_sum(weights: jax.Array) -> jax.Array:
    """u32[3, ...]: the three sums over the last axis, which may be added further.

    Raises:
        ValueError: there are more terms than sums of 32 bits hold.
    """
    if weights.shape[-1] > MAX_TERMS:
        raise ValueError(f"exact sums have at most {MAX_TERMS} terms: {weights.shape=}")
    zeros = (jnp.uint32(0),) * 3
    # One reduction of three operands: three apart would read the weights three times.
    sums = lax.reduce(cut(weights), zeros, lambda x, y: tuple(map(lax.add, x, y)), (weights.ndim - 1,))
    return jnp.stack(sums)


def as_float(sums: jax.Array) -> jax.Array:
    """f32[...] of u32[3, ...], rounded. A greater sum never gives a smaller float."""
    high, middle, low = sums
    middle = middle + (low >> BITS)
    high = high + (middle >> BITS)
    rest = ((middle & (2**BITS - 1)) << BITS) + (low & (2**BITS - 1))
    return high.astype(jnp.float32) * 2.0**-BITS + rest.astype(jnp.float32) * 2.0 ** (-3 * BITS)
