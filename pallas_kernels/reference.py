"""The operation in plain jnp. It is the reference for the kernels, and serves on a CPU without the C code.

Softmax and both products run in float32 for every dtype of the pages. The computation is written for XLA's CPU backend,
on which it costs no more than dense attention over contiguous K/V:

- The K/V of all decodes are cut into blocks. Each iteration of the loop takes a fixed number of blocks of any rows. The
  cost of a step depends on its live tokens, and not on the context limit or its longest row. Scores and weighted sums
  are loops of multiplications and additions that read the pages in place; matrix products would gather the pages first.
  An online softmax per row adds the blocks. Blocks of one row are summed by products with a 0/1 matrix. Barriers keep
  small operands out of these loops, which would otherwise recompute them for every element.
- Prompt chunks are cut into tiles of queries of one row. A tile loops over the K/V blocks up to its last position.
  Tiles are written in token order: the next tile overwrites the rows that a tile writes past its row's end.

All trip counts are data, so nothing recompiles. Masked values are replaced, not multiplied by zero: the content of an
unused page, even a NaN, never reaches the output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.spec import AttentionSpec, RaggedBatch

DECODE_BLOCK_TOKENS = 64
DECODE_BLOCKS_AT_ONCE = 16  # blocks of one iteration, at most 4 per row: a single short row does not cost 16
TILE_QUERIES = 128
TILE_BLOCK_TOKENS = 128

PAGE_AXIS, KV_HEAD_AXIS = 1, 2

NOWHERE = 1 << 30  # a page id past the end of any cache: scatters drop it
MASKED = -1e30  # below every score, but finite: a row without a live token must not become NaN


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class AttentionMetadata:
    """The destination of every token, and the tiles of the chunks."""

    page_table: jax.Array  # i32[S, pages_per_seq]
    kv_lens: jax.Array  # i32[S]
    num_singles: jax.Array  # i32[]
    token_page: jax.Array  # i32[T], NOWHERE for padding
    token_offset: jax.Array  # i32[T]
    tile_row: jax.Array  # i32[tiles]
    tile_token: jax.Array  # i32[tiles], the step's token that is the tile's first query
    tile_position: jax.Array  # i32[tiles], that query's position in its sequence
    num_tiles: jax.Array  # i32[]
    decode_only: bool = jax.tree.static()


def validate(spec: AttentionSpec) -> None:
    """Raises nothing: the reference has no limits."""


def kv_pages(spec: AttentionSpec, num_pages: int) -> jax.ShapeDtypeStruct:
    """The shape and dtype of one layer's pages. Heads come before tokens: the tokens of one head in a page are
    contiguous, as XLA's CPU products need them."""
    shape = (2, num_pages, spec.num_kv_heads, spec.page_size, spec.head_dim)
    return jax.ShapeDtypeStruct(shape, jnp.dtype(spec.kv_dtype))


def make_metadata(
    batch: RaggedBatch, spec: AttentionSpec, *, num_tokens: int, decode_only: bool, spec_decode: bool
) -> AttentionMetadata:
    """The pages and offsets of the step's tokens, and the tiles of its chunks. Each layer of the step uses them.

    With `spec_decode` every token becomes a row, because a tile of a few queries would cost as much as a full tile.
    """
    if spec_decode:
        batch, decode_only = _in_single_tokens(batch, num_tokens), True
    rows = batch.kv_lens.shape[0]
    row_ids = jnp.arange(rows)
    query_lens = jnp.where(row_ids < batch.num_rows, jnp.diff(batch.query_starts), 0)
    first_positions = batch.kv_lens - query_lens

    tokens = jnp.arange(num_tokens)
    token_row = jnp.clip(jnp.searchsorted(batch.query_starts, tokens, side="right") - 1, 0, rows - 1)
    in_row = tokens - batch.query_starts[token_row]
    positions = first_positions[token_row] + in_row
    is_real = (in_row < query_lens[token_row]) & (token_row < batch.num_rows)
    page_slot = jnp.clip(positions // spec.page_size, 0, batch.page_table.shape[1] - 1)
    token_page = jnp.where(is_real, batch.page_table[token_row, page_slot], NOWHERE)

    tiles_per_row = jnp.where(row_ids < batch.num_singles, 0, -(-query_lens // TILE_QUERIES))
    tile_ends = jnp.cumsum(tiles_per_row)
    max_tiles = num_tokens // TILE_QUERIES + rows
    tiles = jnp.arange(max_tiles)
    tile_row = jnp.clip(jnp.searchsorted(tile_ends, tiles, side="right"), 0, rows - 1)
    tile_offset = (tiles - (tile_ends - tiles_per_row)[tile_row]) * TILE_QUERIES
    return AttentionMetadata(
        page_table=batch.page_table,
        kv_lens=batch.kv_lens,
        num_singles=batch.num_rows if decode_only else batch.num_singles,
        token_page=token_page,
        token_offset=positions % spec.page_size,
        tile_row=tile_row,
        tile_token=batch.query_starts[tile_row] + tile_offset,
        tile_position=first_positions[tile_row] + tile_offset,
        num_tiles=tile_ends[-1],
        decode_only=decode_only,
    )


def _in_single_tokens(batch: RaggedBatch, num_tokens: int) -> RaggedBatch:
    """The batch with a row for each token. The K/V of all tokens are appended before any token attends, so each token
    finds the K/V of the tokens before it."""
    rows = batch.kv_lens.shape[0]
    tokens = jnp.arange(num_tokens)
    num_real = batch.query_starts[-1]
    row = jnp.clip(jnp.searchsorted(batch.query_starts, tokens, side="right") - 1, 0, rows - 1)
    positions = batch.kv_lens[row] - (batch.query_starts[row + 1] - tokens)
    return RaggedBatch(
        page_table=batch.page_table[row],
        kv_lens=jnp.where(tokens < num_real, positions + 1, 0),
        query_starts=jnp.minimum(jnp.arange(num_tokens + 1), num_real),
        num_singles=num_real,
        num_rows=num_real,
    )


def append_and_attend(
    queries: jax.Array,  # [T, N, H]
    keys: jax.Array,  # [T, K, H]
    values: jax.Array,  # [T, K, H]
    kv_pages: jax.Array,  # [2, P, K, page, H]
    metadata: AttentionMetadata,
    first_page: jax.Array | int,
    *,
    spec: AttentionSpec,
) -> tuple[jax.Array, jax.Array]:
    """Appends the step's K/V to the pages, and attends over them. Returns the output [T, N, H] and the pages."""
    kv_pages = _append(keys, values, kv_pages, metadata, first_page)
    tokens, heads, head_dim = queries.shape
    grouped = queries.reshape(tokens, spec.num_kv_heads, heads // spec.num_kv_heads, head_dim)
    grouped = grouped.astype(jnp.float32) * spec.scale
    out = _attend_decodes(grouped, kv_pages, metadata, first_page)
    if not metadata.decode_only:
        out = _attend_tiles(grouped, out, kv_pages, metadata, first_page)
    return out.astype(queries.dtype).reshape(queries.shape), kv_pages


def _append(
    keys: jax.Array, values: jax.Array, kv_pages: jax.Array, metadata: AttentionMetadata, first_page: jax.Array | int
) -> jax.Array:
    page = (metadata.token_page + first_page)[:, None]
    offset = metadata.token_offset[:, None]
    head = jnp.arange(keys.shape[1])[None]
    for which, new in enumerate((keys, values)):
        kv_pages = kv_pages.at[which, page, head, offset].set(new, mode="drop", unique_indices=True)
    return kv_pages


def _read_pages(
    kv_pages: jax.Array,  # [2, P, K, page, H]
    pages: jax.Array,  # i32[B, n]
    is_live: jax.Array,  # bool[B, n * page]
) -> tuple[jax.Array, jax.Array]:
    """The K and V of each block of pages, f32[B, K, n, page, H] each. Values that are not live are zero."""
    _, num_pages, heads, page_size, head_dim = kv_pages.shape
    flat = kv_pages.reshape(2 * num_pages * heads, page_size, head_dim)
    key_rows = pages[:, None, :] * heads + jnp.arange(heads)[None, :, None]  # [B, K, n]
    keys, values = (flat.at[rows].get(mode="promise_in_bounds") for rows in (key_rows, key_rows + num_pages * heads))
    values = jnp.where(is_live.reshape(pages.shape[0], 1, -1, page_size, 1), values, 0)
    return keys.astype(jnp.float32), values.astype(jnp.float32)


def _online_softmax(
    carry: tuple[jax.Array, jax.Array, jax.Array],  # acc [..., Q, H], running maximum and sum [..., Q]
    scores: jax.Array,  # [..., Q, block]
    mask: jax.Array,  # bool, broadcastable to scores
    values: jax.Array,  # [..., block, H]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    acc, maximum, total = carry
    scores = jnp.where(mask, scores, MASKED)
    new_maximum = jnp.maximum(maximum, scores.max(-1))
    weights = jnp.exp(scores - new_maximum[..., None])
    shrink = jnp.exp(maximum - new_maximum)
    return acc * shrink[..., None] + weights @ values, new_maximum, total * shrink + weights.sum(-1)


def _attend_decodes(
    queries: jax.Array,  # f32[T, K, G, H], scaled
    kv_pages: jax.Array,
    metadata: AttentionMetadata,
    first_page: jax.Array | int,
) -> jax.Array:
    """The attention f32[T, K, G, H] of the first num_singles tokens (token i is row i). Other tokens are 0, or are
    overwritten later."""
    rows = min(metadata.kv_lens.shape[0], queries.shape[0])
    row_ids = jnp.arange(rows)
    queries_of_rows = queries[:rows]
    pages_per_block = max(1, DECODE_BLOCK_TOKENS // kv_pages.shape[3])
    block_tokens = pages_per_block * kv_pages.shape[3]
    table = _pad_columns(metadata.page_table[:rows], pages_per_block) + first_page
    table = table.reshape(rows, -1, pages_per_block)
    lens = jnp.where(row_ids < metadata.num_singles, metadata.kv_lens[:rows], 0)
    num_blocks = -(-lens // block_tokens)
    ends = jnp.cumsum(num_blocks)  # row r has the blocks [ends[r - 1], ends[r]) of the step's
    at_once = min(DECODE_BLOCKS_AT_ONCE, 4 * rows)

    def attend_blocks(index: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        acc, maximum, total = carry  # [rows, K, G, H], [rows, K, G] twice
        number = index * at_once + jnp.arange(at_once)
        row = jnp.sum(number[:, None] >= ends, axis=1)
        is_of_row = row[:, None] == row_ids  # [blocks, rows]; False for numbers past the last block
        row = jnp.minimum(row, rows - 1)
        block = jnp.minimum(number - (ends - num_blocks)[row], table.shape[1] - 1)
        is_live = block[:, None] * block_tokens + jnp.arange(block_tokens) < lens[row][:, None]
        pages, is_live, block_queries = lax.optimization_barrier((table[row, block], is_live, queries_of_rows[row]))
        keys, values = _read_pages(kv_pages, pages, is_live)
        scores = _score_keys(block_queries, keys)
        scores = jnp.where(is_live[:, None, None, :], scores, MASKED)
        peaks = jnp.where(is_of_row[:, :, None, None], scores.max(-1)[:, None], MASKED)
        new_maximum = jnp.maximum(maximum, peaks.max(0))
        weights = jnp.exp(scores - lax.optimization_barrier(new_maximum[row])[..., None])
        shrink = jnp.exp(maximum - new_maximum)
        to_rows = is_of_row.astype(jnp.float32).T  # [rows, blocks]
        sums = _weigh_values(lax.optimization_barrier(weights), values)
        acc = acc * shrink[..., None] + jnp.tensordot(jnp.repeat(to_rows, pages_per_block, axis=1), sums, 1)
        return acc, new_maximum, total * shrink + jnp.tensordot(to_rows, weights.sum(-1), 1)

    out = _finish(lax.fori_loop(0, -(-ends[-1] // at_once), attend_blocks, _start(queries_of_rows)))
    return jnp.pad(out, [(0, queries.shape[0] - rows)] + [(0, 0)] * 3)


def _score_keys(queries: jax.Array, keys: jax.Array) -> jax.Array:
    """The scores f32[B, K, G, n * page] of queries [B, K, G, H] and keys [B, K, n, page, H]."""
    scores = _sums([keys * query[:, :, None, None] for query in jnp.unstack(queries, axis=2)], axis=4)
    return jnp.stack([part.reshape(*part.shape[:2], -1) for part in scores], axis=2)


def _weigh_values(weights: jax.Array, values: jax.Array) -> jax.Array:
    """The weighted sums of each page, f32[B * n, K, G, H], of values [B, K, n, page, H] with weights
    [B, K, G, n * page]."""
    values = values.transpose(0, 2, 1, 3, 4)
    weights = weights.reshape(*weights.shape[:3], values.shape[1], -1).transpose(2, 0, 3, 1, 4)  # [G, B, n, K, page]
    sums = jnp.stack(_sums([values * part[..., None] for part in weights], axis=3), axis=3)
    return sums.reshape(-1, *sums.shape[2:])


def _sums(terms: list[jax.Array], axis: int) -> tuple[jax.Array, ...]:
    """The sums of all terms over `axis`. One loop computes all of them, so operands that they share are read once."""
    zeros = (np.float32(0),) * len(terms)
    sums = lax.reduce(tuple(terms), zeros, lambda a, b: tuple(map(jnp.add, a, b)), (axis,))
    return lax.optimization_barrier(sums)


def _attend_tiles(
    queries: jax.Array,  # f32[T, K, G, H], scaled
    out: jax.Array,  # f32[T, K, G, H], which holds the decodes' output already
    kv_pages: jax.Array,
    metadata: AttentionMetadata,
    first_page: jax.Array | int,
) -> jax.Array:
    tokens, heads, per_head, head_dim = queries.shape
    page_size = kv_pages.shape[3]
    pages_per_block = max(1, TILE_BLOCK_TOKENS // page_size)
    block_tokens = pages_per_block * page_size
    table = _pad_columns(metadata.page_table, pages_per_block) + first_page
    queries = _pad_rows(queries, tokens + TILE_QUERIES)  # the last tile may reach past the end
    out = _pad_rows(out, tokens + TILE_QUERIES)

    def attend_tile(index: jax.Array, out: jax.Array) -> jax.Array:
        row, token = metadata.tile_row[index], metadata.tile_token[index]
        positions = metadata.tile_position[index] + jnp.arange(TILE_QUERIES)
        live_tokens = jnp.minimum(metadata.kv_lens[row], positions[-1] + 1)
        tile = lax.dynamic_slice_in_dim(queries, token, TILE_QUERIES)  # [Q, K, G, H]
        tile = tile.transpose(1, 0, 2, 3).reshape(1, heads, TILE_QUERIES * per_head, head_dim)

        def attend_block(block: jax.Array, carry: Any) -> Any:
            pages = lax.dynamic_slice(table, (row, block * pages_per_block), (1, pages_per_block))
            kv_positions = block * block_tokens + jnp.arange(block_tokens)
            keys, values = _read_pages(kv_pages, pages, (kv_positions < live_tokens)[None])
            keys, values = (x.reshape(1, heads, block_tokens, head_dim) for x in (keys, values))
            scores = jnp.einsum("skqh,skth->skqt", tile, keys)
            is_causal = kv_positions[None, :] <= jnp.repeat(positions, per_head)[:, None]
            return _online_softmax(carry, scores, is_causal & (kv_positions < live_tokens), values)

        result = _finish(lax.fori_loop(0, -(-live_tokens // block_tokens), attend_block, _start(tile)))
        result = result.reshape(heads, TILE_QUERIES, per_head, head_dim).transpose(1, 0, 2, 3)
        return lax.dynamic_update_slice_in_dim(out, result, token, axis=0)

    return lax.fori_loop(0, metadata.num_tiles, attend_tile, out)[:tokens]


def _start(queries: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    state = queries.shape[:-1]
    return jnp.zeros(queries.shape), jnp.full(state, MASKED), jnp.zeros(state)


def _finish(carry: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
    acc, _, total = carry
    return acc / jnp.maximum(total, 1e-30)[..., None]


def _pad_rows(array: jax.Array, rows: int) -> jax.Array:
    if array.shape[0] >= rows:
        return array[:rows]
    return jnp.pad(array, [(0, rows - array.shape[0])] + [(0, 0)] * (array.ndim - 1))


def _pad_columns(table: jax.Array, multiple: int) -> jax.Array:
    """Pads the table to whole blocks of columns with the null page. The added entries are never live."""
    return jnp.pad(table, ((0, 0), (0, -table.shape[1] % multiple)))
