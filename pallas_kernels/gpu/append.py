"""Append: a scatter by XLA writes the step's new keys and values to their places in the pages, in place.

XLA fuses it with the end of the QKV product and the rotation of the keys: one kernel per layer. A Pallas kernel needs
its operands in memory first, and took two more launches. The counts are in scripts/lab/results/decisions.md.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def append(
    kv_pages: jax.Array,  # [P, 2, K, page, H]
    keys: jax.Array,  # [T, K, H]
    values: jax.Array,  # [T, K, H]
    pages: jax.Array,  # i32[T]; distinct numbers past the last page where a token is padding: those are dropped
    slots: jax.Array,  # i32[T], the token's place in its page
) -> jax.Array:
    """The pages with the new keys and values in them."""
    return kv_pages.at[pages, :, :, slots].set(jnp.stack([keys, values], axis=1), mode="drop", unique_indices=True)
