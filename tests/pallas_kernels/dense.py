"""Dense attention in numpy over contiguous float64 K/V, and random ragged batches: every backend is held to it."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from pallas_kernels import validate
from pallas_kernels.spec import AttentionSpec, RaggedBatch

# For programs of an interpreter's callbacks: half of the seconds that each takes are the compiler's.
QUICKLY_COMPILED = {"xla_backend_optimization_level": 0}


@dataclass(frozen=True, kw_only=True)
class Row:
    query_len: int
    kv_len: int  # with this step's queries


@dataclass(frozen=True, kw_only=True)
class Case:
    spec: AttentionSpec
    batch: RaggedBatch
    queries: np.ndarray  # [T, N, H]
    keys: np.ndarray  # [T, K, H]
    values: np.ndarray  # [T, K, H]
    history: list[tuple[np.ndarray, np.ndarray]]  # per row [kv_len - query_len, K, H]
    rows: list[Row]
    num_pages: int
    num_tokens: int

    @property
    def num_real_tokens(self) -> int:
        return sum(row.query_len for row in self.rows)

    def expected(self) -> np.ndarray:
        """f64[real tokens, N, H]."""
        group = self.spec.num_query_heads // self.spec.num_kv_heads
        out, start = [], 0
        for row, (old_keys, old_values) in zip(self.rows, self.history, strict=True):
            stop = start + row.query_len
            keys = np.concatenate([old_keys, self.keys[start:stop]]).astype(np.float64)
            values = np.concatenate([old_values, self.values[start:stop]]).astype(np.float64)
            keys, values = np.repeat(keys, group, axis=1), np.repeat(values, group, axis=1)
            for i in range(row.query_len):
                live = row.kv_len - row.query_len + i + 1
                scores = np.einsum("nh,tnh->nt", self.queries[start + i].astype(np.float64), keys[:live])
                weights = np.exp(self.spec.scale * (scores - scores.max(-1, keepdims=True)))
                out.append(np.einsum("nt,tnh->nh", weights / weights.sum(-1, keepdims=True), values[:live]))
            start = stop
        return np.stack(out) if out else np.zeros((0, *self.queries.shape[1:]))


def make_case(
    spec: AttentionSpec,
    rows: list[Row],
    *,
    num_tokens: int,
    num_rows: int,
    pages_per_seq: int,
    num_pages: int | None = None,
    seed: int = 0,
) -> Case:
    """Single-token rows must stand first in `rows`. Page ids are a random permutation of 1..; page 0 is nobody's.

    `num_pages` is what is needed and a few more unless given (a fixed number keeps the shapes, and the executable).
    """
    rng = np.random.default_rng(seed)
    dtype = jnp.dtype(spec.dtype)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32).astype(dtype)

    needed = [-(-row.kv_len // spec.page_size) for row in rows]
    num_pages = num_pages or sum(needed) + 4
    free = list(1 + rng.permutation(num_pages - 1))
    table = np.zeros((num_rows, pages_per_seq), np.int32)
    for i, count in enumerate(needed):
        table[i, :count] = [free.pop() for _ in range(count)]
    lens = np.zeros(num_rows, np.int32)
    lens[: len(rows)] = [row.kv_len for row in rows]
    starts = np.full(num_rows + 1, sum(row.query_len for row in rows), np.int32)
    starts[: len(rows)] = np.cumsum([0, *(row.query_len for row in rows)])[:-1]
    num_singles = next((i for i, row in enumerate(rows) if row.query_len != 1), len(rows))
    kv = (spec.num_kv_heads, spec.head_dim)
    batch = RaggedBatch(
        page_table=jnp.asarray(table),
        kv_lens=jnp.asarray(lens),
        query_starts=jnp.asarray(starts),
        num_singles=jnp.int32(num_singles),
        num_rows=jnp.int32(len(rows)),
    )
    validate.page_table(batch, num_pages=num_pages, page_size=spec.page_size)
    return Case(
        spec=spec,
        batch=batch,
        queries=draw(num_tokens, spec.num_query_heads, spec.head_dim),
        keys=draw(num_tokens, *kv),
        values=draw(num_tokens, *kv),
        history=[(draw(r.kv_len - r.query_len, *kv), draw(r.kv_len - r.query_len, *kv)) for r in rows],
        rows=rows,
        num_pages=num_pages,
        num_tokens=num_tokens,
    )
