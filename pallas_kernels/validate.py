"""Checks of the operation's arguments. A caller's mistake raises a ValueError that names it.

Shapes and dtypes are checked whenever a program is traced. Tracing does not see the values of arrays; `page_table`
checks them on the host. The tests of the kernels call it on every batch that they make. Serving does not call it: the
page ids come from the batcher, which owns the pages.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import quantised
from pallas_kernels.backends import implementation
from pallas_kernels.spec import AttentionSpec, Backend, RaggedBatch

DTYPES = ("bfloat16", "float16", "float32")


def spec(spec: AttentionSpec, backend: Backend) -> None:
    """Checks the `spec` of one chip. A spec that passes can be traced and lowered.

    A backend's own limits are in its `validate`. The GPU kernels take up to 16 query heads per KV head. The TPU kernels
    take as many as fit the smallest VMEM with the smallest blocks. The reference takes any number.

    Raises:
        UnavailableError: the backend does not support the spec or the chip, but another backend does.
        ValueError: no backend supports the spec.
    """
    if spec.num_query_heads < 1 or spec.num_kv_heads < 1:
        raise ValueError(f"there must be query heads and KV heads: {spec.num_query_heads=} {spec.num_kv_heads=}")
    if spec.num_query_heads % spec.num_kv_heads:
        raise ValueError(f"query heads must divide over KV heads: {spec.num_query_heads=} {spec.num_kv_heads=}")
    if spec.head_dim < 1:
        raise ValueError(f"a head has at least one dimension: {spec.head_dim=}")
    if spec.page_size < 1:
        raise ValueError(f"a page holds at least one token: {spec.page_size=}")
    if spec.dtype not in [jnp.dtype(name) for name in DTYPES]:
        raise ValueError(f"attention takes activations of {', '.join(DTYPES)}: {spec.dtype=}")
    stored = [jnp.dtype(spec.dtype), *quantised.LARGEST]
    if spec.kv_dtype not in stored:
        raise ValueError(
            f"K/V are stored in the activations' dtype, or in {' or '.join(map(str, quantised.LARGEST))}: "
            f"{spec.kv_dtype=} {spec.dtype=}"
        )
    implementation(backend).validate(spec)


def batch(batch: RaggedBatch, *, num_tokens: int, decode_only: bool) -> None:
    """Checks the shapes of a step's batch against each other."""
    rows, pages_per_seq = batch.page_table.shape
    if num_tokens < 1 or rows < 1 or pages_per_seq < 1:
        raise ValueError(
            f"a step has a token, a row and a page per row at least: {num_tokens=} {rows=} {pages_per_seq=}"
        )
    if batch.kv_lens.shape != (rows,) or batch.query_starts.shape != (rows + 1,):
        raise ValueError(
            f"row counts differ: {batch.page_table.shape=} {batch.kv_lens.shape=} {batch.query_starts.shape=}"
        )
    if decode_only and num_tokens != rows:
        raise ValueError(f"a decode-only step has one token per row: {num_tokens=} {rows=}")


def operands(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    kv_scales: jax.Array | None,
    spec: AttentionSpec,
) -> None:
    """Checks the shapes and dtypes of one layer's arrays against `spec`, which is the whole model's."""
    tokens = queries.shape[0]
    _scales(kv_scales, spec)
    if queries.shape != (tokens, spec.num_query_heads, spec.head_dim):
        raise ValueError(f"queries do not fit {spec=}: {queries.shape=}")
    for name, array in (("keys", keys), ("values", values)):
        if array.shape != (tokens, spec.num_kv_heads, spec.head_dim):
            raise ValueError(f"{name} do not fit {spec=}: {array.shape=} {tokens=}")
        if array.dtype != jnp.dtype(spec.dtype):
            raise ValueError(f"{name} must have the activations' dtype: {array.dtype=} {spec.dtype=}")


def projection(
    columns: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    kv_scales: jax.Array | None,
    spec: AttentionSpec,
) -> None:
    """Checks the shapes and dtypes of one layer's projection and of the rotation against `spec`, the whole model's."""
    _scales(kv_scales, spec)
    heads = spec.num_query_heads + 2 * spec.num_kv_heads
    if columns.ndim != 2 or columns.shape[1] != heads * spec.head_dim or columns.dtype != jnp.dtype(spec.dtype):
        raise ValueError(f"the projection does not fit {spec=}: {columns.shape=} {columns.dtype=}")
    for name, array in (("cos", cos), ("sin", sin)):
        if array.shape != (columns.shape[0], 1, spec.head_dim // 2) or array.dtype != jnp.float32:
            raise ValueError(f"{name} is f32[T, 1, {spec.head_dim // 2}]: {array.shape=} {array.dtype=}")


def _scales(kv_scales: jax.Array | None, spec: AttentionSpec) -> None:
    shape = None if kv_scales is None else kv_scales.shape
    if shape != ((2, spec.num_kv_heads) if spec.has_kv_scales else None):
        raise ValueError(f"8-bit K/V have scales [2, KV heads], others have none: {spec.kv_dtype=} kv_scales: {shape}")


def page_table(batch: RaggedBatch, *, num_pages: int, page_size: int) -> None:
    """Checks the values of a concrete batch against a cache of `num_pages` pages, page 0 included.

    A device does not detect a wrong page id: it reads or overwrites another sequence's K/V.

    Raises:
        ValueError: a row's live page is out of range or is page 0, two rows share a page that this step writes to, or
            the lengths do not fit the table.
    """
    table, kv_lens, starts = (np.asarray(x) for x in (batch.page_table, batch.kv_lens, batch.query_starts))
    query_lens = np.diff(starts)
    if (query_lens < 0).any() or (query_lens > kv_lens).any():
        raise ValueError(f"a row's queries are the last ones of its sequence: {query_lens=} {kv_lens=}")
    if (kv_lens > table.shape[1] * page_size).any():
        raise ValueError(f"a sequence is longer than its page table: {kv_lens.max()=} {table.shape=} {page_size=}")
    written: dict[int, int] = {}  # page -> row
    for row, (kv_len, query_len) in enumerate(zip(kv_lens.tolist(), query_lens.tolist(), strict=True)):
        live = table[row, : -(-kv_len // page_size)]
        if ((live < 1) | (live >= num_pages)).any():
            raise ValueError(f"a live page is out of range: {row=} {live=} {num_pages=}")
        for page in live[(kv_len - query_len) // page_size :].tolist() if query_len else ():
            if written.setdefault(page, row) != row:
                raise ValueError(f"two rows write to one page: {page=} rows {written[page]} and {row}")
