"""Batches with their queries and K/V for the GPU kernels: contiguous, and in pages scattered at random."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.spec import AttentionSpec, RaggedBatch
from scripts.lab.accounts.gpu_prediction import Rows


@dataclass(frozen=True, kw_only=True)
class Operands:
    """A step of one layer. The step's K/V are the last of every row."""

    spec: AttentionSpec
    rows: Rows
    batch: RaggedBatch
    num_pages: int  # the null page included
    queries: jax.Array  # [T, N, H]
    keys: jax.Array  # [sum of KV lengths, K, H], row after row
    values: jax.Array

    @property
    def num_tokens(self) -> int:
        """The tokens of all rows."""
        return sum(query_len for query_len, _ in self.rows)

    @property
    def decode_only(self) -> bool:
        return all(query_len == 1 for query_len, _ in self.rows)

    @property
    def uniform(self) -> bool:
        """Whether all rows have the same shape; batched attention without pages requires it."""
        return len(set(self.rows)) == 1

    def new(self, whole: jax.Array) -> jax.Array:
        """The keys or values of the step's tokens: [T, K, H]."""
        ends = np.cumsum([kv_len for _, kv_len in self.rows])
        index = [np.arange(end - query_len, end) for (query_len, _), end in zip(self.rows, ends, strict=True)]
        return whole[np.concatenate(index)]

    def places(self, *, with_new: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Index in `keys`, page, and slot in the page: of every token, or of those before the step."""
        table, begin = np.asarray(self.batch.page_table), 0
        index, pages, slots = [], [], []
        for row, (query_len, kv_len) in enumerate(self.rows):
            position = np.arange(kv_len if with_new else kv_len - query_len)
            index.append(begin + position)
            pages.append(table[row, position // self.spec.page_size])
            slots.append(position % self.spec.page_size)
            begin += kv_len
        return np.concatenate(index), np.concatenate(pages), np.concatenate(slots)

    def pages(self, *, fill: float = 0.0, with_new: bool = False) -> jax.Array:
        """[P, 2, K, page, H], with `fill` in slots without a token."""
        index, pages, slots = self.places(with_new=with_new)
        spec = self.spec
        shape = (self.num_pages, 2, spec.num_kv_heads, spec.page_size, spec.head_dim)
        store = jnp.full(shape, fill, spec.dtype)
        both = jnp.stack([self.keys[index], self.values[index]], axis=1)  # [tokens, 2, K, H]
        return store.at[pages, :, :, slots].set(both)


def make_operands(spec: AttentionSpec, rows: Rows, seed: int) -> Operands:
    """A batch of `rows` with random values, its pages scattered. Equal seeds give equal operands."""
    counts = [-(-kv_len // spec.page_size) for _, kv_len in rows]
    rng = np.random.default_rng(seed)
    ids = 1 + rng.permutation(sum(counts)).astype(np.int32)
    table = np.zeros((len(rows), max(counts)), np.int32)
    for row, (count, end) in enumerate(zip(counts, np.cumsum(counts), strict=True)):
        table[row, :count] = ids[end - count : end]
    starts = np.concatenate([[0], np.cumsum([q for q, _ in rows])]).astype(np.int32)
    batch = RaggedBatch(
        page_table=jnp.asarray(table),
        kv_lens=jnp.asarray([n for _, n in rows], jnp.int32),
        query_starts=jnp.asarray(starts),
        num_singles=jnp.int32(sum(q == 1 for q, _ in rows)),
        num_rows=jnp.int32(len(rows)),
    )
    keys = jax.random.split(jax.random.key(int(rng.integers(1 << 30))), 3)
    kv_shape = (sum(n for _, n in rows), spec.num_kv_heads, spec.head_dim)
    return Operands(
        spec=spec,
        rows=rows,
        batch=batch,
        num_pages=1 + sum(counts),
        queries=jax.random.normal(keys[0], (int(starts[-1]), spec.num_query_heads, spec.head_dim), spec.dtype),
        keys=jax.random.normal(keys[1], kv_shape, spec.dtype),
        values=jax.random.normal(keys[2], kv_shape, spec.dtype),
    )
