"""Append: a step's new keys and values go to their places in the pages, in the same program, in place.

A scatter of XLA's: one kernel per layer over a few hundred KiB. It copies nothing as long as the caller donates the
pages (or carries them through a loop); the compile-only tests look at the buffer assignment.
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
