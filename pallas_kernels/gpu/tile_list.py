"""The work list of prefill: tiles of queries and, for a short chunk on a long context, parts of their keys.

A chunk of few queries on a long context is cut into parts (`parts`). The lists are built once per step, inside the
program, and shared by all layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.gpu.parts import NO_PARTS, Parts, cdiv, cut, merge_counts

TOKEN_ALIGNMENT = 8  # rows of a swizzled tile: the copy engine can start at its multiples only

# Fields of a prefill tile: the sequence's row (of padding, any row), the first token that is loaded (a multiple of 8),
# the tokens [begin, end) whose output is written, the offset from a token's index to its position in the sequence, the
# sequence's length, the blocks of keys [first, end) that are read, the number of the partial result (-1: the tile has
# all of its keys and writes the output), and the offset from a token's index to its place in the partial results, a
# multiple of 8.
(
    TILE_ROW,
    TILE_TOKEN,
    TILE_BEGIN,
    TILE_END,
    TILE_POSITION,
    TILE_KV_LEN,
    TILE_FIRST_BLOCK,
    TILE_END_BLOCK,
    TILE_PART,
    TILE_SHIFT,
) = range(10)
TILE_FIELDS = 10


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TileList:
    """The lists of a step, the used entries first."""

    tiles: jax.Array  # i32[NT, TILE_FIELDS], those with the most keys first
    num_tiles: jax.Array  # i32[1]
    merges: jax.Array | None  # i32[T, MERGE_FIELDS]; None: no row of the program is cut
    num_merges: jax.Array | None  # i32[2], see parts.merge_counts


def num_prefill_tiles(num_rows: int, num_tokens: int, tile_tokens: int) -> int:
    """The most tiles, if none is cut: full tiles, a ragged start and end per sequence, and tiles of padding tokens."""
    return num_tokens // tile_tokens + 2 * min(num_rows, num_tokens) + 2


def num_part_tiles(parts: Parts) -> int:
    """The most partial results of tiles. Each has a place for at least eight tokens."""
    return parts.num_slots // TOKEN_ALIGNMENT


def prefill_tiles(
    kv_lens: jax.Array,  # i32[S]
    query_starts: jax.Array,  # i32[S + 1]
    num_singles: jax.Array,  # i32[]
    *,
    num_tokens: int,  # a multiple of 8, at least tile_tokens
    tile_tokens: int,  # a multiple of 8
    block_kv: int,
    parts: Parts = NO_PARTS,
) -> TileList:
    """The list of a step.

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
    counts = jnp.where(ends > starts, cdiv(ends - aligned, tile_tokens), 0)  # tiles, if they are not cut
    cuts = _cuts(starts, ends, lens, counts, tile_tokens, block_kv, parts)
    num_units = counts * cuts.parts

    last = jnp.cumsum(num_units)
    unit = jnp.arange(num_prefill_tiles(num_rows, num_tokens, tile_tokens) + num_part_tiles(parts), dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(last, unit, side="right", method="compare_all"), num_rows)
    of_row = unit - (last - num_units)[row]
    # The tiles of a row that read the same keys are next to each other, for the L2 cache.
    part, tile = of_row // jnp.maximum(counts[row], 1), of_row % jnp.maximum(counts[row], 1)
    token = aligned[row] + tile * tile_tokens
    begin = jnp.maximum(token, starts[row])
    end = jnp.minimum(token + tile_tokens, ends[row])
    position = jnp.where(row < num_rows, lens[row] - ends[row], 0)
    visible = jnp.where(lens[row] > 0, end + position, 0)  # keys that the tile's last token sees
    first_block = part * cuts.length[row]
    end_block = jnp.clip(cdiv(visible, block_kv), first_block, first_block + cuts.length[row])
    is_cut = cuts.parts[row] > 1
    number = jnp.where(is_cut, cuts.first_part[row] + tile * cuts.parts[row] + part, -1)
    shift = jnp.where(is_cut, cuts.first_slot[row] + part * cuts.span[row] - aligned[row], 0)
    loaded = jnp.minimum(token, num_tokens - tile_tokens)
    # The page table has no row for padding. A kernel may fetch the first block of a tile without keys (see `ring`).
    in_table = jnp.minimum(row, num_rows - 1)
    fields = (in_table, loaded, begin, end, position, lens[row], first_block, end_block, number, shift)
    tiles = jnp.stack([field.astype(jnp.int32) for field in fields], axis=1)
    keys = jnp.maximum(jnp.minimum(visible, end_block * block_kv) - first_block * block_kv, 0)
    keys = jnp.where(unit < last[-1], keys, -1)  # unused entries last
    merges = num_merges = None
    if parts.num_slots:
        merges, num_merges = _merges(starts, ends, aligned, cuts, num_tokens, tile_tokens)
    return TileList(
        tiles=tiles[jnp.argsort(-keys)], num_tiles=last[-1:].astype(jnp.int32), merges=merges, num_merges=num_merges
    )


@dataclass(frozen=True, kw_only=True)
class _Cuts:
    """How the keys of each row are cut: i32[S + 1] each."""

    parts: jax.Array
    length: jax.Array  # blocks of a part
    span: jax.Array  # tokens of the row, with those around it up to multiples of 8
    first_part: jax.Array
    first_slot: jax.Array


def _cuts(
    starts: jax.Array,
    ends: jax.Array,
    lens: jax.Array,
    counts: jax.Array,
    tile_tokens: int,
    block_kv: int,
    parts: Parts,
) -> _Cuts:
    # Not `counts`: a row that does not start at a multiple of 8 may have a tile more, but must be cut in the same way.
    wanted, length = cut(lens, cdiv(ends - starts, tile_tokens), block_kv, parts)
    aligned_ends = cdiv(ends, TOKEN_ALIGNMENT) * TOKEN_ALIGNMENT
    span = aligned_ends - starts // TOKEN_ALIGNMENT * TOKEN_ALIGNMENT
    slots, numbers = (jnp.where(wanted > 1, wanted * size, 0) for size in (span, counts))
    last_slot, last_number = jnp.cumsum(slots), jnp.cumsum(numbers)
    fits = last_slot <= parts.num_slots
    return _Cuts(
        parts=jnp.where(fits, wanted, 1),
        length=jnp.where(fits, length, cdiv(lens, block_kv)),
        span=span,
        first_part=last_number - numbers,
        first_slot=last_slot - slots,
    )


def _merges(
    starts: jax.Array, ends: jax.Array, aligned: jax.Array, cuts: _Cuts, num_tokens: int, tile_tokens: int
) -> tuple[jax.Array, jax.Array]:
    """The tokens of all rows that are cut: i32[T, MERGE_FIELDS], and `parts.merge_counts` of them."""
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(ends, token, side="right", method="compare_all"), ends.shape[0] - 1)
    is_cut = (cuts.parts[row] > 1) & (token >= starts[row])
    parts, inside = cuts.parts[row], token - aligned[row]
    tile = inside // tile_tokens
    offset = token - jnp.minimum(aligned[row] + tile * tile_tokens, num_tokens - tile_tokens)
    fields = (token, cuts.first_slot[row] + inside, cuts.span[row], cuts.first_part[row] + tile * parts, parts, offset)
    merges = jnp.stack([field.astype(jnp.int32) for field in fields], axis=1)
    return merges[jnp.argsort(~is_cut)], merge_counts(is_cut, parts)
