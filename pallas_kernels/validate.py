"""Static checks: shapes and dtypes, before anything is compiled. The caller's mistake is a ValueError that names it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from pallas_kernels.api import AttentionSpec, Backend, RaggedBatch


def spec(spec: AttentionSpec, backend: Backend) -> None:
    """`spec` as one chip sees it."""
    if spec.num_query_heads % spec.num_kv_heads:
        raise ValueError(f"query heads must divide over KV heads: {spec.num_query_heads=} {spec.num_kv_heads=}")
    if spec.page_size < 1:
        raise ValueError(f"a page holds at least one token: {spec.page_size=}")
    if jnp.dtype(spec.kv_dtype) != jnp.dtype(spec.dtype):
        raise ValueError(f"K/V are stored in the activations' dtype: {spec.kv_dtype=} {spec.dtype=}")
    family = backend.split("-")[0]
    if family == "tpu":
        from pallas_kernels.tpu import layout as tpu_layout

        tpu_layout.validate(spec)
    elif family == "gpu":
        from pallas_kernels.gpu import attention as gpu

        gpu.validate(spec)


def batch(batch: RaggedBatch, *, num_tokens: int, decode_only: bool) -> None:
    rows, _ = batch.page_table.shape
    if batch.kv_lens.shape != (rows,) or batch.query_starts.shape != (rows + 1,):
        raise ValueError(
            f"row counts differ: {batch.page_table.shape=} {batch.kv_lens.shape=} {batch.query_starts.shape=}"
        )
    if decode_only and num_tokens != rows:
        raise ValueError(f"a decode-only step has one token per row: {num_tokens=} {rows=}")


def operands(queries: jax.Array, keys: jax.Array, values: jax.Array, kv_pages: jax.Array, spec: AttentionSpec) -> None:
    tokens = queries.shape[0]
    if queries.shape != (tokens, spec.num_query_heads, spec.head_dim):
        raise ValueError(f"queries do not fit {spec=}: {queries.shape=}")
    for name, array in (("keys", keys), ("values", values)):
        if array.shape != (tokens, spec.num_kv_heads, spec.head_dim):
            raise ValueError(f"{name} do not fit {spec=}: {array.shape=} {tokens=}")
        if array.dtype != jnp.dtype(spec.kv_dtype):  # kv_pages may hold it packed in words
            raise ValueError(f"{name} must have the pages' dtype: {array.dtype=} {spec.kv_dtype=}")
