"""The pages of a network that drafts: its own K/V under the page ids and page tables of the model.

The network reads a position only when it is about to draft, so a page may lack the network's K/V. For each page, the
number of leading positions with K/V is kept. A step that writes a token of the model reduces this number to the token's
position. So the K/V of a rejected draft, or of a former request of the page, are never read. If the prefix cache gives
a page to another request, the page keeps its draft K/V.

Shape legend: `T` tokens of the step (padded), `S` rows (padded), `P` pages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from batcher.slots import SlotLayout
from model.execution import page_text
from model.execution.rows import StepRows


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DraftPages:
    """The network's part of the state on the device."""

    kv: list[jax.Array]  # the K/V pages of each layer, in the layout of pallas_kernels
    filled: jax.Array  # i32[P], number of leading positions of each page that the network has read
    features: jax.Array | None = None  # [P, page_size, E], the model's features at each position; None: unused


def keep_features(pages: DraftPages, features: jax.Array, page: jax.Array, offset: jax.Array) -> DraftPages:
    """Stores features [T, E] at these pages and offsets, i32[T] each."""
    assert pages.features is not None, "the network reads no features"
    kept = pages.features.at[page, offset].set(features.astype(pages.features.dtype), mode="drop")
    return replace(pages, features=kept)


def lengths(filled: jax.Array, rows: StepRows, page_size: int) -> jax.Array:
    """The number i32[S] of leading positions of each row that the network has read, at most `rows.past`."""
    own = filled.at[rows.state[:, SlotLayout.PAGE_TABLE :]].get(mode="clip")  # [S, pages_per_seq]
    num_full = jnp.sum(jnp.cumprod(own == page_size, axis=1), axis=1, dtype=jnp.int32)
    last = jnp.take_along_axis(own, jnp.minimum(num_full, own.shape[1] - 1)[:, None], axis=1)[:, 0]
    length = num_full * page_size + jnp.where(num_full < own.shape[1], last, 0)
    return jnp.minimum(length, rows.past)


def take_back(filled: jax.Array, rows: StepRows, positions: jax.Array, page_size: int) -> jax.Array:
    """Reduces `filled` so that the positions of the step's tokens, and all later ones, count as not read.

    Args:
        positions: i32[T], the positions of the tokens that the model writes.
    """
    page, offset = page_text.places(rows, positions, page_size=page_size, num_pages=filled.shape[0])
    return filled.at[page].min(offset, mode="drop")


def fill(filled: jax.Array, page: jax.Array, offset: jax.Array) -> jax.Array:
    """Raises `filled` so that these pages and offsets, of any shape, count as read. The positions before them must have
    K/V."""
    return filled.at[page].max(offset + 1, mode="drop")
