"""The order in which the mixed kernel takes rows, their query blocks, and the KV blocks that each query block sees.

Query blocks begin at whole tiles of the step's tokens (`Geometry.token_tile`), because copies of rows do. A row's first
block may therefore begin with tokens of the row before: it skips them.

An example: row 5 adds 600 tokens to 900 older ones, row 6 is a whole prompt of 200 tokens; row 5 begins at token 3 of
the step. Query blocks have 512 tokens, KV blocks 1024, tiles 16. The entries, each with the tokens of its KV block that
its last query sees:

    cursor (5, 0, 0)    queries 900-1408    tokens 0-1023        after 3 that are skipped
           (5, 0, 1)                        tokens 1024-1408     last: the query block's output is stored
           (5, 1, 0)    queries 1409-1499   tokens 0-1023        fetched again
           (5, 1, 1)                        tokens 1024-1499     last
           (6, 0, 0)    queries 0-199       tokens 0-199         after 11; first and last
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.tpu import paging
from pallas_kernels.tpu.layout import Geometry
from pallas_kernels.tpu.tiles import FewBlocks, MixedBlocks

type Cursor = tuple[Any, Any, Any]  # row, query block of the row, KV block of the row


@dataclass(frozen=True, kw_only=True)
class QueryBlock:
    """A block of queries of one row."""

    row: Any
    index: Any  # in its row
    start: Any  # its first token in the step: a multiple of `token_tile`
    skip: Any  # tokens of earlier rows that it begins with
    num_q: Any  # its tokens, those included
    position: Any  # of token `start`, in the row's sequence; negative if the sequence begins behind it
    row_end: Any  # the token past the row's last, in the step
    next: tuple[Any, Any]  # row and index of the following block


def query_block_at(
    row: Any,  # with tokens
    index: Any,
    kv_lens: Any,  # i32[S] in SMEM
    query_starts: Any,  # i32[S + 1] in SMEM
    g: Geometry,
    blocks: MixedBlocks | FewBlocks,
) -> QueryBlock:
    """Query block `index` of a row."""
    begin, end = query_starts[row], query_starts[row + 1]
    first = lax.div(begin, g.token_tile) * g.token_tile
    start = pl.multiple_of(first + index * blocks.q_block, g.token_tile)
    num_q = jnp.minimum(blocks.q_block, end - start)
    row_ends = start + num_q >= end
    return QueryBlock(
        row=row,
        index=index,
        start=start,
        skip=jnp.maximum(begin - start, 0),
        num_q=num_q,
        position=kv_lens[row] - end + start,
        row_end=end,
        next=(jnp.where(row_ends, row + 1, row), jnp.where(row_ends, 0, index + 1)),
    )


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One KV block of one query block."""

    block: QueryBlock
    kv_index: Any
    first_kv_page: Any  # the first page, of the sequence's, that holds the KV block
    kv_words: tuple[Any, Any]  # the range of the KV block's live words in the sequence
    position: Any  # of the query block's first query, counted from the KV block's first token; may be negative
    is_last: Any  # the query block's last KV block
    next: Cursor  # the following entry


def entry_at(
    cursor: Cursor,
    kv_lens: Any,  # i32[S] in SMEM
    query_starts: Any,  # i32[S + 1] in SMEM
    g: Geometry,
    blocks: MixedBlocks | FewBlocks,
) -> Entry:
    """The entry of a cursor, which must be of a row with tokens."""
    row, q_index, kv_index = cursor
    block = query_block_at(row, q_index, kv_lens, query_starts, g, blocks)
    num_kv = block.position + block.num_q  # tokens that the last query sees
    first_token = kv_index * blocks.kv_block
    first_word = kv_index * (blocks.kv_block // g.kv_packing)
    is_last = first_token + blocks.kv_block >= num_kv
    return Entry(
        block=block,
        kv_index=kv_index,
        first_kv_page=lax.div(first_token, g.page_size),
        kv_words=(
            first_word,
            jnp.minimum(paging.words_of(num_kv, g.kv_packing), first_word + blocks.kv_block // g.kv_packing),
        ),
        position=block.position - first_token,
        is_last=is_last,
        next=(
            jnp.where(is_last, block.next[0], row),
            jnp.where(is_last, block.next[1], q_index),
            jnp.where(is_last, 0, kv_index + 1),
        ),
    )
