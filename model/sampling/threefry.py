"""Threefry-2x32: random numbers as a function of a key and a counter (Salmon et al., SC 2011, "Random numbers: as easy
as 1, 2, 3"), 20 rounds.

It is the generator of JAX, but one call serves all rows of a step, each with its own key. With `vmap` and `fold_in`
XLA's CPU compiler spends more time on the generator than on a layer of the model.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA


def threefry2x32(key: tuple[jax.Array, jax.Array], counter: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Two u32 of random bits for every counter. Keys and counters are u32 and are broadcast."""
    keys = (*key, key[0] ^ key[1] ^ jnp.uint32(PARITY))
    x, y = counter[0] + keys[0], counter[1] + keys[1]
    for group in range(5):
        for distance in ROTATIONS[group % 2]:
            x = x + y
            y = x ^ ((y << distance) | (y >> (32 - distance)))
        x = x + keys[(group + 1) % 3]
        y = y + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x, y


def gumbel(bits: jax.Array) -> jax.Array:
    """Standard Gumbel noise f32 from random bits u32. It is finite, because the uniform number is never 0 or 1."""
    uniform = (bits >> 9).astype(jnp.float32) * 2.0**-23 + 2.0**-24
    return -jnp.log(-jnp.log(uniform))
