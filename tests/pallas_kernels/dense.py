"""Dense attention in numpy over contiguous float64 K/V, and random ragged batches: every backend is held to it."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from pallas_kernels import validate
from pallas_kernels.spec import AttentionSpec, RaggedBatch


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
    kv_scales: np.ndarray | None  # f32[2, K], for pages of 8 bits
    rows: list[Row]
    num_pages: int
    num_tokens: int

    @property
    def num_real_tokens(self) -> int:
        return sum(row.query_len for row in self.rows)

    @property
    def scales(self) -> tuple[np.ndarray, ...]:
        """The scale arguments of the operation: one array, or none."""
        return () if self.kv_scales is None else (self.kv_scales,)

    def in_pages(self, row: int, *, with_step: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values [tokens, K, H] of a row as the pages hold them; those of the step come last."""
        start = sum(length.query_len for length in self.rows[:row])
        stop = start + self.rows[row].query_len if with_step else start
        new = (self.keys[start:stop], self.values[start:stop])
        old_and_new = [np.concatenate(pair) for pair in zip(self.history[row], new, strict=True)]
        keys, values = (self._stored(x, kind) for kind, x in enumerate(old_and_new))
        return keys, values

    def _stored(self, x: np.ndarray, kind: int) -> np.ndarray:
        if self.kv_scales is None:
            return x
        units = x.astype(np.float32) * (np.float32(1) / self.kv_scales[kind])[:, None]
        if self.spec.kv_dtype == jnp.int8:
            return np.clip(np.rint(units), -127, 127).astype(np.int8)
        return np.clip(units, -448, 448).astype(jnp.float8_e4m3fn)

    def expected(self) -> np.ndarray:
        """f64[real tokens, N, H]: attention over the pages' values, whose scales are applied as the operation says."""
        group = self.spec.num_query_heads // self.spec.num_kv_heads
        key_scales, value_scales = np.ones((2, 1)) if self.kv_scales is None else np.repeat(self.kv_scales, group, 1)
        queries = self.queries
        if self.kv_scales is not None:
            queries = (queries.astype(np.float32) * key_scales[:, None]).astype(queries.dtype)
        out, start = [], 0
        for index, row in enumerate(self.rows):
            keys, values = (np.repeat(x.astype(np.float64), group, axis=1) for x in self.in_pages(index))
            for i in range(row.query_len):
                live = row.kv_len - row.query_len + i + 1
                scores = np.einsum("nh,tnh->nt", queries[start + i].astype(np.float64), keys[:live])
                weights = np.exp(self.spec.scale * (scores - scores.max(-1, keepdims=True)))
                attended = np.einsum("nt,tnh->nh", weights / weights.sum(-1, keepdims=True), values[:live])
                out.append(attended * value_scales[:, None])
            start += row.query_len
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
    """Single-token rows must stand first in `rows`. Page ids are a random permutation of 1..; page 0 is the null page.

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
        kv_scales=_kv_scales(spec, rng),
        rows=rows,
        num_pages=num_pages,
        num_tokens=num_tokens,
    )


def _kv_scales(spec: AttentionSpec, rng: np.random.Generator) -> np.ndarray | None:
    """Unlike scales of the heads, under which the largest of a few hundred normal values are clipped, or none are."""
    if not spec.has_kv_scales:
        return None
    largest = 127 if spec.kv_dtype == jnp.int8 else 448
    return rng.uniform(2.5, 5.0, (2, spec.num_kv_heads)).astype(np.float32) / np.float32(largest)
