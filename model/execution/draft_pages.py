"""The pages of a network that drafts: its own K/V under the page ids and page tables of the model.

The network reads a position only when drafts are about to be taken, so a page may lack K/V of it. The number of leading
positions that have them is kept for each page. A step that writes a token of the model takes back what the page
had from there on. So the K/V of a rejected draft, or of a page's former request, are never read. A page that the prefix
cache gives to another request brings its draft K/V with it.

Shape legend: `T` tokens of the step (padded), `S` rows (padded), `P` pages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp

from batcher.slots import SlotLayout
from model.execution import page_text
from model.execution.rows import StepRows


@partial(jax.tree_util.register_dataclass)
@dataclass(frozen=True, kw_only=True)
class DraftPages:
    """The network's part of the state on the device."""

    kv: list[jax.Array]  # per layer, laid out by pallas_kernels
    filled: jax.Array  # i32[P], leading positions of each page that the network has read
    features: jax.Array | None = None  # [P, page_size, E], of the model at each position; None: the network reads none


def keep_features(pages: DraftPages, features: jax.Array, page: jax.Array, offset: jax.Array) -> DraftPages:
    """The pages with features [T, E] at these pages and offsets, i32[T] each."""
    assert pages.features is not None, "the network reads no features"
    kept = pages.features.at[page, offset].set(features.astype(pages.features.dtype), mode="drop")
    return replace(pages, features=kept)


def lengths(filled: jax.Array, rows: StepRows, page_size: int) -> jax.Array:
    """i32[S]: the leading positions of each row that the network has read, at most `rows.past`."""
    own = filled.at[rows.state[:, SlotLayout.PAGE_TABLE :]].get(mode="clip")  # [S, pages_per_seq]
    num_full = jnp.sum(jnp.cumprod(own == page_size, axis=1), axis=1, dtype=jnp.int32)
    last = jnp.take_along_axis(own, jnp.minimum(num_full, own.shape[1] - 1)[:, None], axis=1)[:, 0]
    length = num_full * page_size + jnp.where(num_full < own.shape[1], last, 0)
    return jnp.minimum(length, rows.past)


def take_back(filled: jax.Array, rows: StepRows, positions: jax.Array, page_size: int) -> jax.Array:
    """`filled`, without the places of the step's tokens and those after them.

    Args:
        positions: i32[T], of the tokens that the model writes.
    """
    page, offset = page_text.places(rows, positions, page_size=page_size, num_pages=filled.shape[0])
    return filled.at[page].min(offset, mode="drop")


def fill(filled: jax.Array, page: jax.Array, offset: jax.Array) -> jax.Array:
    """`filled`, with positions of any shape at these pages and offsets. Those before them have their K/V."""
    return filled.at[page].max(offset + 1, mode="drop")
