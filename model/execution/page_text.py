"""The tokens of the K/V in each page. Drafts are looked up in this text, and draft networks read it.

A token has the same page and offset as its K/V. So requests that share pages share their text, a preempted request
finds it again, and the host sends nothing for it.

Shape legend: `T` tokens of the step (padded), `S` rows (padded), `P` pages, `L` tokens of pages_per_seq pages.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from batcher.slots import SlotLayout
from model.execution.rows import StepRows, row_of_tokens


def places(rows: StepRows, positions: jax.Array, *, page_size: int, num_pages: int) -> tuple[jax.Array, jax.Array]:
    """The page of each of the step's tokens and its offset in the page, i32[T] each. Padding has the page `num_pages`,
    which scatters drop.

    Args:
        positions: i32[T], the positions of the tokens in their sequences.
    """
    row, is_real = row_of_tokens(rows, positions.shape[0])
    page = rows.state[row, SlotLayout.PAGE_TABLE + positions // page_size]
    return jnp.where(is_real, page, num_pages), positions % page_size


def write(text: jax.Array, rows: StepRows, tokens: jax.Array, positions: jax.Array) -> jax.Array:
    """Writes the step's tokens i32[T] at their positions i32[T] to `text` i32[P, page_size]."""
    at = places(rows, positions, page_size=text.shape[1], num_pages=text.shape[0])
    return text.at[at].set(tokens, mode="drop")


def read(text: jax.Array, rows: StepRows) -> jax.Array:
    """The tokens i32[S, L] of each row, up to the last one at `rows.past`. Later entries have no meaning."""
    known = of_pages(text, rows)
    # The last token has no K/V yet.
    is_last = jnp.arange(known.shape[1], dtype=jnp.int32) == rows.past[:, None]
    return jnp.where(is_last, rows.state[:, SlotLayout.LAST_TOKEN, None], known)


def of_pages(text: jax.Array, rows: StepRows) -> jax.Array:
    """The tokens i32[S, L] of each row that have K/V. Later entries have no meaning."""
    pages = rows.state[:, SlotLayout.PAGE_TABLE :]
    return text.at[pages].get(mode="clip").reshape(pages.shape[0], -1)
