"""What the operation refuses: specs before anything is traced, and values of a ragged batch, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import validate
from pallas_kernels.api import PagedAttention
from pallas_kernels.spec import AttentionSpec, Backend, RaggedBatch

# Row 0 decodes its fifth token into page 3, row 1 brings tokens 2 and 3 of its first page, row 2 is padding.
BATCH = RaggedBatch(
    page_table=jnp.array([[2, 3, 0], [1, 0, 0], [0, 0, 0]]),
    kv_lens=jnp.array([5, 3, 0]),
    query_starts=jnp.array([0, 1, 3, 3]),
    num_singles=jnp.int32(1),
    num_rows=jnp.int32(2),
)


def check(**changes: jnp.ndarray) -> None:
    validate.page_table(replace(BATCH, **changes), num_pages=4, page_size=4)


def test_a_right_batch_passes_and_rows_may_share_a_page_that_nobody_writes() -> None:
    check()
    check(page_table=jnp.array([[2, 3, 0], [2, 1, 0], [0, 0, 0]]), kv_lens=jnp.array([5, 6, 0]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_table": jnp.array([[2, 4, 0], [1, 0, 0], [0, 0, 0]])}, r"out of range: row=0"),
        ({"page_table": jnp.array([[2, 3, 0], [0, 0, 0], [0, 0, 0]])}, r"out of range: row=1"),
        ({"page_table": jnp.array([[2, -1, 0], [1, 0, 0], [0, 0, 0]])}, r"out of range: row=0"),
        (
            {"page_table": jnp.array([[2, 3, 0], [3, 0, 0], [0, 0, 0]])},
            r"two rows write to one page: page=3 rows 0 and 1",
        ),
        ({"kv_lens": jnp.array([13, 3, 0])}, "longer than its page table"),
        ({"kv_lens": jnp.array([5, 1, 0])}, "last ones of its sequence"),
        ({"query_starts": jnp.array([0, 1, 0, 0])}, "last ones of its sequence"),
    ],
)
def test_what_a_device_would_get_silently_wrong_is_named(changes: dict[str, jnp.ndarray], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(**changes)


def spec(**changes: object) -> AttentionSpec:
    usual = {"num_query_heads": 8, "num_kv_heads": 2, "head_dim": 64, "page_size": 16}
    return AttentionSpec(**usual | {"dtype": jnp.bfloat16, "kv_dtype": jnp.bfloat16} | changes)


@pytest.mark.parametrize("backend", Backend)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 0}, r"spec\.num_query_heads=8 spec\.num_kv_heads=0"),
        ({"num_query_heads": 0}, r"spec\.num_query_heads=0 spec\.num_kv_heads=2"),
        ({"num_query_heads": -8, "num_kv_heads": -2}, r"spec\.num_query_heads=-8 spec\.num_kv_heads=-2"),
        ({"num_query_heads": 9}, r"must divide over KV heads: spec\.num_query_heads=9 spec\.num_kv_heads=2"),
        ({"head_dim": 0}, r"spec\.head_dim=0"),
        ({"page_size": 0}, r"spec\.page_size=0"),
        ({"dtype": jnp.int8, "kv_dtype": jnp.int8}, r"spec\.dtype="),
        ({"kv_dtype": jnp.float16}, r"spec\.kv_dtype="),
    ],
)
def test_a_spec_that_makes_no_sense_is_refused_by_every_backend(
    backend: Backend, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        PagedAttention(spec(**changes), backend)


def abstract_step(attention: PagedAttention, *, decode_only: bool) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Traces a step of three rows, kernels included, and returns its shapes."""
    num_tokens = 3 if decode_only else 24

    def array(*shape: int, dtype: object = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    def step(batch: RaggedBatch, q: jax.Array, k: jax.Array, v: jax.Array, pages: jax.Array, scales: Any) -> Any:
        metadata = attention.make_metadata(batch, num_tokens=num_tokens, decode_only=decode_only)
        return attention(q, k, v, pages, metadata, kv_scales=scales)

    batch = RaggedBatch(
        page_table=array(3, 5), kv_lens=array(3), query_starts=array(4), num_singles=array(), num_rows=array()
    )
    heads = attention.spec
    queries = array(num_tokens, heads.num_query_heads, heads.head_dim, dtype=heads.dtype)
    keys = array(num_tokens, heads.num_kv_heads, heads.head_dim, dtype=heads.dtype)
    scales = array(2, heads.num_kv_heads, dtype=jnp.float32) if heads.has_kv_scales else None
    return jax.eval_shape(step, batch, queries, keys, keys, attention.kv_pages(16), scales)


@st.composite
def specs(draw: st.DrawFn) -> AttentionSpec:
    """Mostly what a model could have, with up to two fields that it could not."""
    num_kv_heads = draw(st.integers(1, 9))
    dtype = draw(st.sampled_from([jnp.bfloat16, jnp.bfloat16, jnp.float16, jnp.float32]))
    fields = {
        "num_query_heads": num_kv_heads * draw(st.integers(1, 20)),
        "num_kv_heads": num_kv_heads,
        "head_dim": draw(st.sampled_from([64, 128])),
        "page_size": draw(st.sampled_from([16, 32, 64, 128])),
        "dtype": dtype,
        "kv_dtype": dtype,
    }
    unusual = {
        "num_query_heads": st.integers(-1, 700),
        "num_kv_heads": st.integers(-2, 70),
        "head_dim": st.sampled_from([-64, 0, 1, 80, 256]),
        "page_size": st.sampled_from([-16, 0, 1, 7, 48, 256, 512]),
        "dtype": st.sampled_from([jnp.int8, "half", "no"]),
        "kv_dtype": st.sampled_from([jnp.int8, jnp.float8_e4m3fn, jnp.float32, "no"]),
    }
    for field in draw(st.sets(st.sampled_from(sorted(unusual)), max_size=2)):
        fields[field] = draw(unusual[field])
    return AttentionSpec(**fields)


@settings(max_examples=40, database=None)
@given(
    spec=specs(), backend=st.sampled_from([Backend.REFERENCE, Backend.TPU_INTERPRET, Backend.GPU]), decode=st.booleans()
)
def test_a_spec_is_refused_at_once_or_its_step_can_be_traced(
    spec: AttentionSpec, backend: Backend, decode: bool
) -> None:
    try:
        attention = PagedAttention(spec, backend)
    except ValueError as error:
        assert "=" in str(error) or "VMEM" in str(error)  # noqa: PT017
        return
    output, pages = abstract_step(attention, decode_only=decode)
    assert output.shape == (3 if decode else 24, spec.num_query_heads, spec.head_dim)
    assert output.dtype == jnp.dtype(spec.dtype)
    assert (pages.shape, pages.dtype) == (attention.kv_pages(16).shape, attention.kv_pages(16).dtype)
