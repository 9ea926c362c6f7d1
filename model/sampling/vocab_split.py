"""The vocabulary split over the chips: each chip works on the logits that it made, and small results are exchanged.

Code that runs on one chip's part takes a `VocabShard`, which knows where the part lies and what the chips can tell each
other. Without a mesh the same code runs on the whole vocabulary, and the exchanges do nothing.
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

from model.network.sharding import TENSOR_AXIS, num_shards_of, partition

REPLICATED = P()
BY_VOCAB = partition(("rows", "vocab"))  # of [rows, V], and of what the chips found, chip after chip


@dataclass(frozen=True, kw_only=True)
class VocabShard:
    """One chip's consecutive part of the vocabulary. The whole of it if `num_shards` is 1."""

    vocab_size: int
    num_shards: int = 1

    @property
    def size(self) -> int:
        """Tokens of one shard: its arrays are [rows, size]."""
        return self.vocab_size // self.num_shards

    @property
    def start(self) -> jax.Array | int:
        """This shard's first token."""
        return lax.axis_index(TENSOR_AXIS) * self.size if self.num_shards > 1 else 0

    @property
    def tokens(self) -> jax.Array:
        """i32[size]: this shard's token ids."""
        return self.start + jnp.arange(self.size, dtype=jnp.int32)

    def locate(self, tokens: jax.Array) -> jax.Array:
        """Where this shard has `tokens`; `size`, which a scatter drops, for those of the other shards."""
        index = tokens - self.start
        return jnp.where((index >= 0) & (index < self.size), index, self.size)

    def total(self, values: jax.Array) -> jax.Array:
        """The sum of `values` over the shards, on all of them. One exchange."""
        return lax.psum(values, TENSOR_AXIS) if self.num_shards > 1 else values

    def gather(self, *columns: jax.Array) -> tuple[jax.Array, ...]:
        """Every shard's columns, of 32-bit numbers: [rows, n] becomes [rows, num_shards * n]. One exchange for all."""
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
    """How the vocabulary lies on `mesh`; None is one device."""

    vocab_size: int
    mesh: Mesh | None = None

    def run(self, function: Callable[..., Any], *args: Any, in_specs: Sequence[P], out_specs: Any) -> Any:
        """`function(shard, *args)` on every chip, with its parts of the arguments that are split `BY_VOCAB`.

        Results are put together chip after chip, or promised to be the same on all chips, as `out_specs` says.
        """
        shard = VocabShard(vocab_size=self.vocab_size, num_shards=num_shards_of(self.mesh))
        if shard.num_shards == 1:
            return function(shard, *args)
        return jax.shard_map(
            lambda *parts: function(shard, *parts),
            mesh=self.mesh,
            in_specs=tuple(in_specs),
            out_specs=out_specs,
            check_vma=False,  # what follows an all_gather is the same on all chips; the check cannot tell
        )(*args)


def first_of_greatest(values: jax.Array, tokens: jax.Array) -> jax.Array:
    """i32[rows]: of the greatest of `values` [rows, n], the lowest of `tokens`, i32[n] or [rows, n].

    Two plain reductions: XLA's argmax takes a CPU twice as long as both. A row with a NaN has no greatest: it gets the
    last of its tokens, since it must get some.
    """
    # Without the barrier XLA would write the greatest out once for every value.
    is_best = values == lax.optimization_barrier(jnp.max(values, axis=-1, keepdims=True))
    none = jnp.iinfo(jnp.int32).max
    first = jnp.min(jnp.where(is_best, tokens, none), axis=-1)
    return jnp.where(first == none, tokens[..., -1], first)
