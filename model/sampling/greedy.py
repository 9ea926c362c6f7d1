"""The greedy token of each row and whether its logits are finite, in as few passes over the logits as a chip allows.

Accelerators take one pass: a reduction of three columns at once. A TPU computes it in the product that makes the
logits, and a GPU in two launches. CPUs take three passes of plain reductions, which XLA compiles to vector
instructions; it would compile the reduction of three columns to a scalar loop.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from model.sampling.vocab_split import first_of_greatest

_NONE = jnp.iinfo(jnp.int32).max


def greedy(logits: jax.Array) -> jax.Array:
    """The lowest token i32[S] with the greatest logit, from logits f32[S, V]. A row with a NaN gets its last token."""
    return first_of_greatest(logits, jnp.arange(logits.shape[-1], dtype=jnp.int32))


def greedy_and_finite(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The tokens of `greedy`, i32[S], and whether all logits of a row are finite, bool[S], from logits f32[S, V]."""
    return lax.platform_dependent(logits, cpu=in_plain_passes, default=in_one_pass)


def in_plain_passes(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`greedy_and_finite` by plain reductions."""
    return greedy(logits), all_finite(logits)


def in_one_pass(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`greedy_and_finite` by one reduction."""
    tokens = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    lowest = jnp.float32(-jnp.inf)
    greatest, first, largest = lax.reduce(
        (logits, tokens, jnp.abs(logits)), (lowest, jnp.int32(_NONE), lowest), _better, (logits.ndim - 1,)
    )
    first = jnp.where(jnp.isnan(largest), logits.shape[-1] - 1, first)
    # Where the greatest logit is not used, the TPU compiler stores it in bfloat16, and so may compare in bfloat16.
    return first, (largest < jnp.inf) & (greatest < jnp.inf)


def _better(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Combines two (logit, token, absolute value). The result has the greater logit with its token, and the larger
    absolute value, or NaN. If the logits are equal, the lower token is taken."""
    takes_b = (b[0] > a[0]) | ((b[0] == a[0]) & (b[1] < a[1]))
    return jnp.where(takes_b, b[0], a[0]), jnp.where(takes_b, b[1], a[1]), jnp.maximum(a[2], b[2])


def all_finite(logits: jax.Array) -> jax.Array:
    """Whether all logits of a row are finite, bool[S], from logits f32[S, V]. It tests the maximum, which XLA computes
    in the product that makes the logits. A test of each logit would read them again."""
    return jnp.max(jnp.abs(logits), axis=-1) < jnp.inf  # a maximum with a NaN is NaN
