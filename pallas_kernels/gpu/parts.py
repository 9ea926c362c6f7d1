"""How the keys of a row are cut into parts. `combine` merges the partial results of the parts.

Few rows, or rows of few queries, have too few units of work to fill the chip. Their keys are cut into parts, and each
part is a unit. How a row is cut depends only on its own lengths and on the chip, so its results do not depend on the
rest of the step. There is one exception: if the partial results of a step do not fit into their memory, the first row
that does not fit, and all rows after it, are not cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gpu.vector import THREADS

# Fields of a token whose partial results are merged: its index, its place in the first of them, the distance from one
# place to the next, the number of the first partial result, how many there are, and the token's place in the tile.
MERGE_TOKEN, MERGE_FIRST_SLOT, MERGE_SLOT_STRIDE, MERGE_FIRST_PART, MERGE_PARTS, MERGE_OFFSET = range(6)
MERGE_FIELDS = 6


@dataclass(frozen=True, kw_only=True)
class Parts:
    """How rows are cut. It is static: every step of a program has the same. With `max_parts` 1, no row is cut."""

    max_parts: int  # most parts of one unit; the parts of all KV heads fill the chip
    min_keys: int  # least keys of one part; its partial results are small compared with the keys and values it reads
    max_slots: int  # tokens in the memory of the partial results
    long_row: int = 1 << 30  # keys from which on a row may have smaller parts: it often has the chip for itself
    min_keys_of_long: int = 1 << 30  # of a part of such a row

    @property
    def num_slots(self) -> int:
        """The number of tokens in the memory of the partial results; 0: no row is cut."""
        return self.max_slots if self.max_parts > 1 else 0

    @property
    def vector(self) -> int:
        """The length of a vector that holds one number of each part of a unit."""
        return cdiv(self.max_parts, THREADS) * THREADS


NO_PARTS = Parts(max_parts=1, min_keys=1, max_slots=0)


def merge_counts(is_cut: jax.Array, counts: jax.Array) -> jax.Array:
    """i32[2]: the number of tokens whose partial results are merged, and the most parts of a token."""
    return jnp.stack([is_cut.sum(), jnp.max(jnp.where(is_cut, counts, 0))]).astype(jnp.int32)


def cut(lens: jax.Array, units: Any, block_kv: int, parts: Parts) -> tuple[jax.Array, jax.Array]:
    """The parts of rows of `lens` keys that are `units` units each if they are not cut, and the blocks of a part. All
    parts but the last are equal, and none is empty."""
    blocks = cdiv(lens, block_kv)
    most = jnp.where(units > 0, parts.max_parts // jnp.maximum(units, 1), 1)
    min_keys = jnp.where(lens < parts.long_row, parts.min_keys, min(parts.min_keys, parts.min_keys_of_long))
    wanted = jnp.minimum(most, lens // min_keys).clip(1)
    length = cdiv(blocks, wanted)
    return cdiv(blocks, jnp.maximum(length, 1)).clip(1), length


def cdiv(a: Any, b: Any) -> Any:
    """a / b, rounded up."""
    return (a + b - 1) // b
