"""The order in which the mixed kernel takes rows, their query blocks, and the KV blocks that each query block sees.

An example: row 5 adds 600 tokens to 900 older ones, row 6 is a whole prompt of 200 tokens; query blocks have 512
tokens, KV blocks 1024. The entries, each with the tokens of its KV block that its last query sees:

    cursor (5, 0, 0)    queries 900-1411    tokens 0-1023
           (5, 0, 1)                        tokens 1024-1411    last: the query block's output is stored
           (5, 1, 0)    queries 1412-1499   tokens 0-1023       fetched again
           (5, 1, 1)                        tokens 1024-1499    last
           (6, 0, 0)    queries 0-199       tokens 0-199        first and last
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels.tpu import paging
from pallas_kernels.tpu.layout import Geometry
from pallas_kernels.tpu.tiles import MixedBlocks, Tiles

type Cursor = tuple[Any, Any, Any]  # row, query block of the row, KV block of the row


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One KV block of one query block."""

    row: Any
    kv_index: Any
    q_start: Any  # the query block's first token in the step
    num_q: Any  # its live tokens
    first_kv_page: Any  # the first page, of the sequence's, that holds the KV block
    kv_words: tuple[Any, Any]  # the range of the KV block's live words in the sequence
    tiles: Tiles
    is_last: Any  # the query block's last KV block
    next: Cursor  # the following entry


def entry_at(
    cursor: Cursor,
    kv_lens: Any,  # i32[S] in SMEM
    query_starts: Any,  # i32[S + 1] in SMEM
    g: Geometry,
    blocks: MixedBlocks,
) -> Entry:
    """The entry of a cursor, which must be of a row with tokens."""
    row, q_index, kv_index = cursor
    begin, end = query_starts[row], query_starts[row + 1]
    q_start = begin + q_index * blocks.q_block
    num_q = jnp.minimum(blocks.q_block, end - q_start)
    position = kv_lens[row] - end + q_start  # of the first query, in the sequence
    num_kv = position + num_q  # tokens that the last query sees
    first_token = kv_index * blocks.kv_block
    first_word = kv_index * (blocks.kv_block // g.kv_packing)
    is_last = first_token + blocks.kv_block >= num_kv
    row_ends = is_last & (q_start + num_q >= end)
    return Entry(
        row=row,
        kv_index=kv_index,
        q_start=q_start,
        num_q=num_q,
        first_kv_page=lax.div(first_token, g.page_size),
        kv_words=(
            first_word,
            jnp.minimum(paging.words_of(num_kv, g.kv_packing), first_word + blocks.kv_block // g.kv_packing),
        ),
        tiles=Tiles.of(g, blocks, num_q=num_q, position=position - first_token),
        is_last=is_last,
        next=(
            jnp.where(row_ends, row + 1, row),
            jnp.where(row_ends, 0, jnp.where(is_last, q_index + 1, q_index)),
            jnp.where(is_last, 0, kv_index + 1),
        ),
    )
