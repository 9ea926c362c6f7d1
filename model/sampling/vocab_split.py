"""The vocabulary split over the chips: each chip works on its own logits, and small results are exchanged.

Code for one chip's part takes a `VocabShard`, which has the bounds of the part and the exchanges between chips. Without
a mesh the same code runs on the whole vocabulary, and the exchanges do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from model.network.row_ops import BY_XLA, RowOps
from model.network.sharding import TENSOR_AXIS, num_shards_of, partition

REPLICATED = P()
BY_VOCAB = partition(("rows", "vocab"))  # the split of [rows, V], and of the chips' concatenated results


@dataclass(frozen=True, kw_only=True)
class VocabShard:
    """One chip's contiguous part of the vocabulary, which is all of it if `num_shards` is 1."""

    vocab_size: int
    num_shards: int = 1
    ops: RowOps = BY_XLA  # the model's operations

    @property
    def size(self) -> int:
        """The number of tokens of one shard. Its arrays are [rows, size]."""
        return self.vocab_size // self.num_shards

    @property
    def start(self) -> jax.Array | int:
        """This shard's first token."""
        return lax.axis_index(TENSOR_AXIS) * self.size if self.num_shards > 1 else 0

    @property
    def tokens(self) -> jax.Array:
        """The token ids i32[size] of this shard."""
        return self.start + jnp.arange(self.size, dtype=jnp.int32)

    def locate(self, tokens: jax.Array) -> jax.Array:
        """The index of `tokens` in this shard. Tokens of other shards get `size`, which a scatter drops."""
        index = tokens - self.start
        return jnp.where((index >= 0) & (index < self.size), index, self.size)

    def total(self, values: jax.Array) -> jax.Array:
        """The sum of `values` over all shards. Every shard gets it. It takes one exchange."""
        return lax.psum(values, TENSOR_AXIS) if self.num_shards > 1 else values

    def gather(self, *columns: jax.Array) -> tuple[jax.Array, ...]:
        """The 32-bit columns of all shards: [rows, n] becomes [rows, num_shards * n]. All columns take one exchange."""
        if self.num_shards == 1:
            return columns
        bits = [lax.bitcast_convert_type(x, jnp.uint32) for x in columns]
        everyones = lax.all_gather(jnp.concatenate(bits, axis=1), TENSOR_AXIS, axis=1)  # [rows, num_shards, all n]
        ends = [sum(x.shape[1] for x in columns[: i + 1]) for i in range(len(columns) - 1)]
        parts = jnp.split(everyones, ends, axis=2)
        return tuple(
            lax.bitcast_convert_type(part.reshape(part.shape[0], -1), x.dtype)
            for part, x in zip(parts, columns, strict=True)
        )


@dataclass(frozen=True)
class VocabSplit:
    """The split of the vocabulary over `mesh`. None is one device.

    Attributes:
        ops: the model's operations, which compute exponentials of logits.
        in_blocks: one device draws for a block of rows at a time (`row_blocks`).
    """

    vocab_size: int
    mesh: Mesh | None = None
    ops: RowOps = BY_XLA
    in_blocks: bool = False

    def run(self, function: Callable[..., Any], *args: Any, in_specs: Sequence[P], out_specs: Any) -> Any:
        """Calls `function(shard, *args)` on every chip, with the chip's parts of arguments that are split `BY_VOCAB`.

        `out_specs`: results are either concatenated (`BY_VOCAB`), or must be the same on all chips (`REPLICATED`).
        """
        shard = VocabShard(vocab_size=self.vocab_size, num_shards=num_shards_of(self.mesh), ops=self.ops)
        if shard.num_shards == 1:
            return function(shard, *args)
        return jax.shard_map(
            lambda *parts: function(shard, *parts),
            mesh=self.mesh,
            in_specs=tuple(in_specs),
            out_specs=out_specs,
            check_vma=False,  # results of an all_gather are equal on all chips; the check cannot infer it
        )(*args)


def first_of_greatest(values: jax.Array, tokens: jax.Array) -> jax.Array:
    """The lowest of `tokens`, i32[n] or [rows, n], with the greatest value in `values` [rows, n]: i32[rows].

    It takes two plain reductions: on a CPU, XLA's argmax takes twice as long as both. A row with a NaN has no greatest
    value, and gets its last token.
    """
    # Without the barrier XLA would materialise the greatest once for every value.
    is_best = values == lax.optimization_barrier(jnp.max(values, axis=-1, keepdims=True))
    none = jnp.iinfo(jnp.int32).max
    first = jnp.min(jnp.where(is_best, tokens, none), axis=-1)
    return jnp.where(first == none, tokens[..., -1], first)
