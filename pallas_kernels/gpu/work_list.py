"""The work lists of the CTAs. They are built once per step, inside the program, and shared by all layers.

The lists are data: a new mix of lengths is a new list, never a new program.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Fields of a decode work item. A row of -1 is an unused entry.
ITEM_ROW, ITEM_FIRST_BLOCK, ITEM_NUM_BLOCKS, ITEM_KV_LEN, ITEM_IS_SPLIT = range(5)
ITEM_FIELDS = 5

MAX_SPLITS = 128  # of one sequence: `combine` reads their sums in one vector of 128 threads

# The cost of an item besides its blocks, in blocks: the first copy's latency and the partial result. An estimate, not
# measured on a chip.
ITEM_OVERHEAD = 1.0


def num_decode_items(num_rows: int, num_kv_heads: int, resident_ctas: int) -> int:
    """The length of the decode work list: every row once, and three waves of resident CTAs for splits."""
    return num_rows + 3 * resident_ctas // num_kv_heads


def decode_items(
    kv_lens: jax.Array,  # i32[S]
    is_decode: jax.Array,  # bool[S]; a row without keys gets an item too, which writes zeros
    *,
    block_kv: int,
    max_blocks: int,  # of one sequence
    num_kv_heads: int,
    resident_ctas: int,  # that the chip runs at once
) -> tuple[jax.Array, jax.Array]:
    """Returns items i32[W, ITEM_FIELDS] and, per row, (first item, number of items) i32[S, 2].

    Every sequence is cut into equal runs of at most `c` blocks, for the `c` with the least estimated time. So one long
    sequence among short ones, or a small batch, still fills the chip.
    """
    num_rows = kv_lens.shape[0]
    num_items = num_decode_items(num_rows, num_kv_heads, resident_ctas)
    blocks = jnp.where(is_decode, _cdiv(kv_lens, block_kv), 0)  # [S]
    splits = jnp.where(is_decode, _splits(blocks, _candidates(max_blocks)), 0)  # [C, S]
    cost = jax.vmap(lambda s, c: _cost(blocks, s, c, num_kv_heads, resident_ctas))(
        splits, jnp.asarray(_candidates(max_blocks))
    )
    fits = (splits.sum(axis=1) <= num_items) & (splits.max(axis=1) <= MAX_SPLITS)
    splits = splits[jnp.argmin(jnp.where(fits, cost, jnp.inf))]  # [S]

    ends = jnp.cumsum(splits)
    firsts = ends - splits
    item = jnp.arange(num_items, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(ends, item, side="right", method="compare_all"), num_rows - 1)
    length = _cdiv(blocks, jnp.maximum(splits, 1))[row]
    first_block = (item - firsts[row]) * length
    num_blocks = jnp.clip(blocks[row] - first_block, 0, length)
    used = item < ends[-1]
    fields = (jnp.where(used, row, -1), first_block, num_blocks, kv_lens[row], splits[row] > 1)
    items = jnp.stack([field.astype(jnp.int32) for field in fields], axis=1)
    return items, jnp.stack([firsts, splits], axis=1).astype(jnp.int32)


def _candidates(max_blocks: int) -> np.ndarray:
    """Run lengths to choose from: every one up to 16, then each a tenth longer, up to a whole sequence."""
    sizes = list(range(1, 17))
    while sizes[-1] < max_blocks:
        sizes.append(min(max_blocks, sizes[-1] + sizes[-1] // 10))
    return np.asarray(sizes, np.int32)


def _splits(blocks: jax.Array, candidates: np.ndarray) -> jax.Array:
    return jnp.maximum(_cdiv(blocks[None, :], candidates[:, None]), 1)


def _cost(blocks: jax.Array, splits: jax.Array, longest: jax.Array, num_kv_heads: int, resident_ctas: int) -> jax.Array:
    """Estimated time, in blocks per resident CTA: waves of mean items, and the longest item's excess over the mean."""
    items = splits.sum()
    mean = blocks.sum() / jnp.maximum(items, 1)
    waves = _cdiv(items * num_kv_heads, resident_ctas)
    return waves * (mean + ITEM_OVERHEAD) + jnp.maximum(jnp.minimum(longest, blocks.max()) - mean, 0)


def _cdiv(a: Any, b: Any) -> Any:
    return (a + b - 1) // b


# Fields of a prefill tile: the sequence's row, the first token that is loaded (a multiple of 8), the tokens
# [begin, end) whose output is written, the offset from a token's index to its position in the sequence, and the
# sequence's length.
TILE_ROW, TILE_TOKEN, TILE_BEGIN, TILE_END, TILE_POSITION, TILE_KV_LEN = range(6)
TILE_FIELDS = 6

TOKEN_ALIGNMENT = 8  # rows of a swizzled tile: the copy engine can start at its multiples only


def num_prefill_tiles(num_rows: int, num_tokens: int, tile_tokens: int) -> int:
    """The length of the tile list: full tiles, a ragged start and end per sequence, and tiles of padding tokens."""
    return num_tokens // tile_tokens + 2 * min(num_rows, num_tokens) + 2


def prefill_tiles(
    kv_lens: jax.Array,  # i32[S]
    query_starts: jax.Array,  # i32[S + 1]
    num_singles: jax.Array,  # i32[]
    *,
    num_tokens: int,  # a multiple of 8, at least tile_tokens
    tile_tokens: int,  # a multiple of 8
) -> tuple[jax.Array, jax.Array]:
    """Returns tiles i32[NT, TILE_FIELDS], those with the longest context first, and their number, i32[1].

    Padding tokens after the last sequence are in tiles without keys: their output is zero. The CTAs take the tiles in
    this order, in rounds of alternating direction, which balances the triangle of a causal prompt.
    """
    num_rows = kv_lens.shape[0]
    starts, ends = query_starts[:-1], query_starts[1:]
    is_chunk = jnp.arange(num_rows) >= num_singles
    # The padding tokens are treated as one more row, after the others.
    starts = jnp.append(jnp.where(is_chunk, starts, ends), query_starts[-1])
    ends = jnp.append(ends, num_tokens)
    lens = jnp.append(kv_lens, 0)
    aligned = starts // TOKEN_ALIGNMENT * TOKEN_ALIGNMENT
    counts = jnp.where(ends > starts, _cdiv(ends - aligned, tile_tokens), 0)

    last = jnp.cumsum(counts)
    tile = jnp.arange(num_prefill_tiles(num_rows, num_tokens, tile_tokens), dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(last, tile, side="right", method="compare_all"), num_rows)
    token = aligned[row] + (tile - (last - counts)[row]) * tile_tokens
    begin = jnp.maximum(token, starts[row])
    end = jnp.minimum(token + tile_tokens, ends[row])
    position = jnp.where(row < num_rows, lens[row] - ends[row], 0)
    fields = (row, jnp.minimum(token, num_tokens - tile_tokens), begin, end, position, lens[row])
    tiles = jnp.stack([field.astype(jnp.int32) for field in fields], axis=1)
    context = jnp.where((tile < last[-1]) & (row < num_rows), end + position, 0)
    context = jnp.where(tile < last[-1], context, -1)  # unused entries last
    return tiles[jnp.argsort(-context)], last[-1:].astype(jnp.int32)
