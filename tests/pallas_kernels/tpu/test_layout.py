"""The page layout of the TPU kernels, and what they refuse before anything is compiled."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.api import PagedAttention
from pallas_kernels.spec import AttentionSpec, Backend
from pallas_kernels.tpu import append, layout, paging


def spec(num_query_heads: int, num_kv_heads: int, head_dim: int, **changes) -> AttentionSpec:
    fields = {"page_size": 128, "dtype": jnp.bfloat16} | changes
    return AttentionSpec(
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=fields["page_size"],
        dtype=fields["dtype"],
        kv_dtype=fields.get("kv_dtype", fields["dtype"]),
    )


HEADS = [(32, 8, 64), (24, 8, 128), (32, 8, 128), (8, 1, 128), (4, 1, 64), (6, 3, 64)]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("kv_dtype", [jnp.int8, jnp.bfloat16, jnp.float32])
def test_no_memory_is_padded(heads: tuple[int, int, int], kv_dtype: jnp.dtype) -> None:
    dtype = jnp.bfloat16 if kv_dtype == jnp.int8 else kv_dtype
    pages = layout.kv_pages(spec(*heads, dtype=dtype, kv_dtype=kv_dtype), 10)
    _, num_kv_heads, head_dim = heads
    assert pages.size * 4 == 10 * 128 * 2 * num_kv_heads * head_dim * jnp.dtype(kv_dtype).itemsize


def test_shapes_by_hand() -> None:
    assert layout.kv_pages(spec(32, 8, 128), 10).shape == (10, 16, 64, 128)
    assert layout.kv_pages(spec(32, 8, 64), 10).shape == (10, 8, 64, 128)  # two heads side by side
    assert layout.kv_pages(spec(4, 1, 64), 10).shape == (10, 1, 64, 128)  # K and V side by side
    assert layout.kv_pages(spec(4, 1, 128, dtype=jnp.float32), 10).shape == (10, 2, 128, 128)
    assert layout.kv_pages(spec(32, 8, 128, kv_dtype=jnp.int8), 10).shape == (10, 16, 32, 128)  # four tokens a word


@pytest.mark.parametrize("heads", HEADS)
def test_scores_and_values_survive_the_rows(heads: tuple[int, int, int]) -> None:
    """A query row times its plane is q . k, and the plane's V comes back to the head that it belongs to."""
    num_query_heads, num_kv_heads, head_dim = heads
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, n, head_dim)) for n in (num_query_heads, num_kv_heads, num_kv_heads))
    g = layout.geometry(spec(*heads))
    planes = np.asarray(layout.kv_to_planes(jnp.asarray(k), jnp.asarray(v), g))[0]
    rows = np.asarray(layout.queries_to_rows(jnp.asarray(q), g))[0]
    scores = np.einsum("pql,pl->pq", rows, planes[: g.num_k_planes])
    group = num_query_heads // num_kv_heads
    expected = np.einsum("nh,nh->n", q[0], np.repeat(k[0], group, axis=0))
    live = g.heads_per_plane * group
    np.testing.assert_allclose(scores[:, :live].ravel(), expected, rtol=1e-5, atol=1e-6)
    assert not scores[:, live:].any()
    v_planes = planes[[g.v_plane(p) for p in range(g.num_k_planes)]]
    values = np.broadcast_to(v_planes[:, None], rows.shape)[None]
    heads_out = layout.rows_to_heads(jnp.asarray(values), g, num_query_heads, head_dim)
    np.testing.assert_allclose(heads_out[0], np.repeat(v[0], group, axis=0), rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"head_dim": 96}, "head_dim 64 or 128"),
        ({"page_size": 8}, "power of two from 16 to 256"),
        ({"page_size": 48}, "power of two from 16 to 256"),
        ({"page_size": 512}, "power of two from 16 to 256"),
        ({"dtype": jnp.float16}, "bfloat16"),
        ({"kv_dtype": jnp.float8_e4m3fn}, "K and V in the queries' dtype or in int8"),
        ({"kv_dtype": jnp.int8, "page_size": 16}, "power of two from 32 to 256 tokens of int8"),
    ],
)
def test_refused_before_compilation(changes: dict, words: str) -> None:
    fields = {"head_dim": 128} | changes
    with pytest.raises(ValueError, match=words):
        PagedAttention(spec(8, 2, **fields), Backend.TPU)


@settings(deadline=None, database=None)
@given(
    packing=st.sampled_from([1, 2, 4]),
    rows=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9)), min_size=1, max_size=8),
)
def test_every_row_s_new_words_have_places_of_their_own(packing: int, rows: list[tuple[int, int]]) -> None:
    """Rows bring so many tokens, from such a position on."""
    start, taken = 0, 0
    for row, (num_tokens, position) in enumerate(rows):
        base = int(append.word_base(jnp.int32(row), jnp.int32(start), packing))
        assert base >= taken
        if num_tokens:
            taken = base + (position + num_tokens - 1) // packing - position // packing + 1
        start += num_tokens
    assert taken <= append.num_word_slots(start, len(rows), packing)


@pytest.mark.parametrize("packing", [2, 4])
def test_older_tokens_by_hand(packing: int) -> None:
    masks = {2: [0, 0xFFFF, 0], 4: [0, 0xFF, 0xFFFF, 0xFFFFFF, 0]}[packing]
    assert [int(paging.older_tokens(jnp.int32(position), packing)) for position in range(packing + 1)] == masks


def test_kv_pages_are_split_by_head() -> None:
    mesh = jax.make_mesh((2,), ("tensor",), devices=jax.devices()[:2])
    pages = PagedAttention(spec(8, 4, 64), Backend.TPU_INTERPRET, mesh).kv_pages(10)
    assert pages.shape == (10, 4, 64, 128)
    assert pages.sharding.shard_shape(pages.shape) == (10, 2, 64, 128)
