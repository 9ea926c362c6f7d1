"""Batches with their queries and K/V, as the timed kernels and their peers take them: contiguous, and in pages
scattered at random."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dense
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

    def places(self) -> tuple[np.ndarray, np.ndarray]:
        """The page of every token, and its slot there."""
        table = np.asarray(self.batch.page_table)
        positions = [np.arange(kv_len) for _, kv_len in self.rows]
        pages = [table[row, position // self.spec.page_size] for row, position in enumerate(positions)]
        return np.concatenate(pages), np.concatenate(positions) % self.spec.page_size

    def pages(self) -> jax.Array:
        """[P, 2, K, page, H], with 0 in slots without a token."""
        pages, slots = self.places()
        spec = self.spec
        shape = (self.num_pages, 2, spec.num_kv_heads, spec.page_size, spec.head_dim)
        both = jnp.stack([self.keys, self.values], axis=1)  # [tokens, 2, K, H]
        return jnp.zeros(shape, spec.dtype).at[pages, :, :, slots].set(both)

    def expected(self) -> np.ndarray:
        """f32[T, N, H]: dense causal attention in numpy, row by row."""
        begin, query_begin, outputs = 0, 0, []
        queries, keys, values = (np.asarray(x.astype(jnp.float32)) for x in (self.queries, self.keys, self.values))
        for query_len, kv_len in self.rows:
            rows, own = slice(begin, begin + kv_len), slice(query_begin, query_begin + query_len)
            outputs.append(dense.attend(queries[own], keys[rows], values[rows], scale=self.spec.scale))
            begin, query_begin = begin + kv_len, query_begin + query_len
        return np.concatenate(outputs)


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
