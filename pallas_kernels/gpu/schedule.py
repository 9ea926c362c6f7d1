"""The work lists: which CTA attends to what. Built once per step, inside the program, and shared by all layers.

Everything here is data: a new mix of lengths is a new list, never a new program.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Fields of a decode work item. A row of -1 is an unused entry.
ITEM_ROW, ITEM_FIRST_BLOCK, ITEM_NUM_BLOCKS, ITEM_KV_LEN, ITEM_IS_SPLIT = range(5)
ITEM_FIELDS = 5

MAX_SPLITS = 128  # of one sequence: the combine reads their sums in one vector of 128 threads

# What an item costs beside its blocks, in blocks: the first copy's latency and the partial result. Chosen by
# reasoning, not measured: to be fitted on a chip.
ITEM_OVERHEAD = 1.0


def num_decode_items(num_rows: int, num_kv_heads: int, resident_ctas: int) -> int:
    """The length of the decode work list: every row once, and splits worth three waves of resident CTAs."""
    return num_rows + 3 * resident_ctas // num_kv_heads


def decode_items(
    kv_lens: jax.Array,  # i32[S]; 0 in rows that do not decode: they get an item that writes zeros
    *,
    block_kv: int,
    max_blocks: int,  # of one sequence
    num_kv_heads: int,
    resident_ctas: int,  # that the chip runs at once
) -> tuple[jax.Array, jax.Array]:
    """Returns items i32[W, ITEM_FIELDS] and, per row, (first item, number of items) i32[S, 2].

    Every sequence is cut into equal runs of at most `c` blocks, for the `c` with the least estimated time, so that
    one long sequence among short ones, or a small batch, still fills the chip.
    """
    num_rows = kv_lens.shape[0]
    num_items = num_decode_items(num_rows, num_kv_heads, resident_ctas)
    blocks = _cdiv(kv_lens, block_kv)  # [S]
    splits = _splits(blocks, _candidates(max_blocks))  # [C, S]
    cost = jax.vmap(lambda s, c: _cost(blocks, s, c, num_kv_heads, resident_ctas))(
        splits, jnp.asarray(_candidates(max_blocks))
    )
    fits = (splits.sum(axis=1) <= num_items) & (splits.max(axis=1) <= MAX_SPLITS)
    splits = splits[jnp.argmin(jnp.where(fits, cost, jnp.inf))]  # [S]

    ends = jnp.cumsum(splits)
    firsts = ends - splits
    item = jnp.arange(num_items, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(ends, item, side="right", method="compare_all"), num_rows - 1)
    length = _cdiv(blocks, splits)[row]
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
    """Estimated time, in blocks per resident CTA: waves of mean items, and what the longest exceeds the mean."""
    items = splits.sum()
    mean = blocks.sum() / items
    waves = _cdiv(items * num_kv_heads, resident_ctas)
    return waves * (mean + ITEM_OVERHEAD) + jnp.maximum(jnp.minimum(longest, blocks.max()) - mean, 0)


def _cdiv(a: Any, b: Any) -> Any:
    return (a + b - 1) // b
