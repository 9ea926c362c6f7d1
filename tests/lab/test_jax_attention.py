"""The attention that JAX ships, in the place of this project's: what an account compares is the same operation.

The kernel itself cannot be interpreted (jax 0.11.2), so the reference that JAX ships with it stands for it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu import ragged_paged_attention as shipped

from model.network.sharding import make_mesh
from pallas_kernels.spec import AttentionSpec, Backend
from scripts.lab.accounts.jax_attention import JaxAttention
from tests.pallas_kernels.dense import Row, make_case

SPEC = AttentionSpec(
    num_query_heads=4, num_kv_heads=2, head_dim=64, page_size=16, dtype=jnp.float32, kv_dtype=jnp.float32
)


def test_as_dense_attention_over_appended_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Row(query_len=1, kv_len=37), Row(query_len=9, kv_len=20), Row(query_len=5, kv_len=5)]
    case = make_case(SPEC, rows, num_tokens=16, num_rows=4, pages_per_seq=8)
    attention = JaxAttention(SPEC, Backend.TPU, make_mesh(1), "tensor")
    pages = np.full(attention.kv_pages(case.num_pages).shape, np.nan, np.float32)
    table = np.asarray(case.batch.page_table)
    for row in range(len(rows)):
        for position, (key, value) in enumerate(zip(*case.in_pages(row, with_step=False), strict=True)):
            page, offset = table[row, position // SPEC.page_size], position % SPEC.page_size
            pages[page, offset, 0::2], pages[page, offset, 1::2] = 0, 0
            pages[page, offset, 0::2, : SPEC.head_dim], pages[page, offset, 1::2, : SPEC.head_dim] = key, value

    def interpreted(*arguments: jax.Array, sm_scale: float, **_: int) -> jax.Array:
        return shipped.ref_ragged_paged_attention(*arguments, sm_scale=sm_scale)

    monkeypatch.setattr(shipped, "ragged_paged_attention", interpreted)
    metadata = attention.make_metadata(case.batch, num_tokens=case.num_tokens, decode_only=False)
    step = attention.append_and_attend(*map(jnp.asarray, (case.queries, case.keys, case.values, pages)), metadata)
    outputs, pages = map(np.asarray, step)
    np.testing.assert_allclose(outputs[: case.num_real_tokens], case.expected(), rtol=2e-5, atol=2e-5)
    for row in range(len(rows)):
        for position, (key, value) in enumerate(zip(*case.in_pages(row), strict=True)):
            stored = pages[table[row, position // SPEC.page_size], position % SPEC.page_size, :, : SPEC.head_dim]
            np.testing.assert_array_equal(stored[0::2], key)
            np.testing.assert_array_equal(stored[1::2], value)
