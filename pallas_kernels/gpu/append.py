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


def destinations(
    page_table: jax.Array,  # i32[S, pages_per_seq]
    kv_lens: jax.Array,  # i32[S]
    query_starts: jax.Array,  # i32[S + 1]
    *,
    num_tokens: int,
    page_size: int,
) -> tuple[jax.Array, jax.Array]:
    """The page and the place in it of every token of the step, i32[T] each; the page of a padding token is -1."""
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    row = jnp.searchsorted(query_starts[1:], token, side="right", method="compare_all")
    is_real = token < query_starts[-1]
    row = jnp.minimum(row, kv_lens.shape[0] - 1)
    position = jnp.where(is_real, kv_lens[row] - query_starts[row + 1] + token, 0)
    page = page_table[row, position // page_size]
    return jnp.where(is_real, page, -1), position % page_size
