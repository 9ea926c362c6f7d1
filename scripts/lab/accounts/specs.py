"""The heads of Llama 3's models, and the attention of heads."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from pallas_kernels.spec import AttentionSpec

MODELS = {  # query heads, KV heads, head dim, as one chip sees them
    "1b": (32, 8, 64),
    "3b": (24, 8, 128),
    "8b": (32, 8, 128),
    "70b/8": (8, 1, 128),
}
KV_DTYPES = {"auto": "bfloat16", "fp8": "float8_e4m3fn", "int8": "int8"}  # by the values of --kv-cache-dtype


def make_spec(
    heads: tuple[int, int, int], page_size: int = 64, dtype: Any = jnp.bfloat16, kv_dtype: Any = None
) -> AttentionSpec:
    """`heads`: query heads, KV heads and head dim on one chip. `kv_dtype`: of the pages (default: `dtype`)."""
    return AttentionSpec(
        num_query_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=heads[2],
        page_size=page_size,
        dtype=dtype,
        kv_dtype=jnp.dtype(dtype if kv_dtype is None else kv_dtype),
    )
