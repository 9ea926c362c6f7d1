"""The page layout of the TPU kernels, and what they refuse before anything is compiled."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.api import PagedAttention
from pallas_kernels.spec import AttentionSpec, Backend
from pallas_kernels.tpu import layout


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


def test_a_projection_is_taken_where_its_columns_are_the_kernels_own() -> None:
    taken = [PagedAttention(spec(*heads), Backend.TPU_INTERPRET).takes_projection for heads in HEADS]
    assert taken == [True, True, True, True, False, False]  # K and V of one head side by side: not as projected
    shared = PagedAttention(spec(3, 3, 64), Backend.TPU_INTERPRET)
    with pytest.raises(ValueError, match="queries and keys must be rotated before"):
        shared.projected(jnp.zeros((8, 576)), jnp.zeros((8, 1, 32)), jnp.zeros((8, 1, 32)), None, None)


def test_a_projection_has_scales_if_the_pages_have_8_bits() -> None:
    columns, cos = jnp.zeros((8, 1536), jnp.bfloat16), jnp.zeros((8, 1, 64))
    for kv_dtype, scales in ((jnp.int8, None), (jnp.bfloat16, jnp.ones((2, 2)))):
        attention = PagedAttention(spec(8, 2, 128, kv_dtype=kv_dtype), Backend.TPU_INTERPRET)
        with pytest.raises(ValueError, match="8-bit K/V have scales"):
            attention.projected(columns, cos, cos, None, None, kv_scales=scales)


@pytest.mark.parametrize(
    ("columns", "cos", "message"),
    [
        (jnp.zeros((8, 1535), jnp.bfloat16), jnp.zeros((8, 1, 64)), "the projection does not fit"),
        (jnp.zeros((8, 1536), jnp.float32), jnp.zeros((8, 1, 64)), "the projection does not fit"),
        (jnp.zeros((8, 1536), jnp.bfloat16), jnp.zeros((8, 64)), "cos is f32"),
    ],
)
def test_a_projection_that_does_not_fit_is_refused(columns: jax.Array, cos: jax.Array, message: str) -> None:
    attention = PagedAttention(spec(8, 2, 128), Backend.TPU_INTERPRET)
    with pytest.raises(ValueError, match=message):
        attention.projected(columns, cos, cos, None, None)


def test_kv_pages_are_split_by_head() -> None:
    mesh = jax.make_mesh((2,), ("tensor",), devices=jax.devices()[:2])
    pages = PagedAttention(spec(8, 4, 64), Backend.TPU_INTERPRET, mesh).kv_pages(10)
    assert pages.shape == (10, 4, 64, 128)
    assert pages.sharding.shard_shape(pages.shape) == (10, 2, 64, 128)
