"""The work list of decode. It is built once per step, inside the program, and shared by all layers.

A long sequence is cut into parts (`parts`). The list is data: a new mix of lengths is a new list, and not a new
program. `tile_list` has the list of prefill.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.gpu.parts import Parts, cdiv, cut, merge_counts

# Fields of an item: the sequence's row, its blocks of keys, its length, and the number of the partial result (-1: the
# item has all of its row's keys and writes the output).
ITEM_ROW, ITEM_FIRST_BLOCK, ITEM_NUM_BLOCKS, ITEM_KV_LEN, ITEM_PART = range(5)
ITEM_FIELDS = 5


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ItemList:
    """The lists of a step, the used entries first."""

    items: jax.Array  # i32[W, ITEM_FIELDS], those of the row with the longest items first
    num_items: jax.Array  # i32[1]
    merges: jax.Array | None  # i32[S, parts.MERGE_FIELDS]; None: no row of the program is cut
    num_merges: jax.Array | None  # i32[2], see parts.merge_counts


def decode_items(
    kv_lens: jax.Array,  # i32[S]
    is_decode: jax.Array,  # bool[S]
    *,
    block_kv: int,
    parts: Parts,
) -> ItemList:
    """Builds the list of a step. Every item has a block. The block of a row without keys is masked, and the row's
    output is zero."""
    num_rows = kv_lens.shape[0]
    blocks = jnp.maximum(cdiv(kv_lens, block_kv), 1)
    counts, lengths = cut(kv_lens, jnp.where(is_decode, 1, 0), block_kv, parts)
    fits = jnp.cumsum(jnp.where(counts > 1, counts, 0)) <= parts.num_slots
    counts = jnp.where(is_decode, jnp.where(fits, counts, 1), 0)
    lengths = jnp.where(counts > 1, lengths, blocks)
    is_cut = counts > 1

    order = jnp.argsort(-jnp.where(is_decode, lengths, 0))
    ends = jnp.cumsum(counts[order])
    item = jnp.arange(num_rows + parts.num_slots, dtype=jnp.int32)
    place = jnp.minimum(jnp.searchsorted(ends, item, side="right", method="compare_all"), num_rows - 1)
    row = order[place]
    part = item - (ends[place] - counts[row])
    first_block = part * lengths[row]
    num_blocks = jnp.clip(blocks[row] - first_block, 1, lengths[row])
    first_part = jnp.cumsum(jnp.where(is_cut, counts, 0)) - counts  # of the rows that are cut
    fields = (row, first_block, num_blocks, kv_lens[row], jnp.where(is_cut[row], first_part[row] + part, -1))
    merges = num_merges = None
    if parts.num_slots:
        token = jnp.arange(num_rows, dtype=jnp.int32)
        one, zero = jnp.ones_like(token), jnp.zeros_like(token)
        merges = _stacked(token, first_part, one, first_part, counts, zero)[jnp.argsort(~is_cut)]
        num_merges = merge_counts(is_cut, counts)
    return ItemList(
        items=jnp.where((item < ends[-1])[:, None], _stacked(*fields), 0), num_items=ends[-1:].astype(jnp.int32),
        merges=merges, num_merges=num_merges,
    )  # fmt: skip


def _stacked(*fields: jax.Array) -> jax.Array:
    return jnp.stack([field.astype(jnp.int32) for field in fields], axis=1)
