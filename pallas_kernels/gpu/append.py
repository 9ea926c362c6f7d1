"""Append: a step's new keys and values go to their places in the pages, in the same program, in place.

A scatter of XLA's, by compile-only evidence: on an H200 it becomes one kernel a layer that finishes the QKV product,
rotates the keys and writes keys and values to the donated pages; a second kernel rotates the queries. A Mosaic kernel
in its place (one CTA a token, pages aliased; written, compiled, not kept) copied nothing either, but its operands have
to be in memory first: rotated keys, sliced values and the kernel itself made two launches a layer more.

    two layers of 8B      64 decodes      2,048 tokens     copies of pages
    scatter               42 + 4          49 + 6           none            (kernels of XLA's + Mosaic's in the graph)
    Mosaic append         47 + 6          52 + 8           none

`tests/scripts/test_compile_gpu_step.py` holds the 32 layers to one such kernel each, no copy, and pages aliased.
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
