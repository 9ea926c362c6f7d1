"""8-bit keys and values: their rounding, and the use of their scales.

A stored value is `x / scale`, rounded to the pages' dtype. There is one scale for the keys and one for the values of
every layer and KV head. Attention reads stored values only. The keys' scale multiplies the queries, so the scores are
those of the true keys. The values' scale multiplies the output. The TPU kernels do this themselves; `with_scales`
does it around the other backends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

LARGEST = {  # the largest stored value of each dtype that pages may have besides the activations'
    jnp.dtype(jnp.int8): 127.0,  # symmetric: -128 is not used
    jnp.dtype(jnp.float8_e4m3fn): 448.0,
}


def quantise(
    x: jax.Array,  # [T, K, H]
    scales: jax.Array,  # f32[K]
    dtype: Any,  # a key of LARGEST
) -> jax.Array:
    """[T, K, H]: `x * (1 / scales)` rounded to `dtype` (ties to even), with values beyond the largest one clipped."""
    largest = LARGEST[jnp.dtype(dtype)]
    # Multiplies by the reciprocal: with fast math, a compiler may divide in one program and multiply in another.
    stored = jnp.clip(x.astype(jnp.float32) * (1.0 / scales)[:, None], -largest, largest)
    return (jnp.round(stored) if jnp.issubdtype(dtype, jnp.integer) else stored).astype(dtype)


def with_scales(append_and_attend: Callable[..., tuple[jax.Array, jax.Array]], dtype: Any) -> Callable[..., Any]:
    """Wraps a backend's `append_and_attend` of stored values: takes true values, and the scales f32[2, K] last."""

    def of_true_values(
        queries: jax.Array, keys: jax.Array, values: jax.Array, kv_pages: jax.Array, metadata: Any, first_page: Any,
        scales: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:  # fmt: skip
        stored = quantise(keys, scales[0], dtype), quantise(values, scales[1], dtype)
        output, kv_pages = append_and_attend(_scaled(queries, scales[0]), *stored, kv_pages, metadata, first_page)
        return _scaled(output, scales[1]), kv_pages

    return of_true_values


def scales_of(
    largest: jax.Array,  # f32[..., K]: the largest magnitudes that are to be stored exactly
    dtype: Any,
) -> jax.Array:
    """The scales that store values up to `largest` without clipping, f32[..., K]; 1 where `largest` is zero."""
    return jnp.where(largest > 0, largest / LARGEST[jnp.dtype(dtype)], 1.0).astype(jnp.float32)


def _scaled(heads: jax.Array, scales: jax.Array) -> jax.Array:
    """Multiplies [T, N, H] by the scale of each head's KV head."""
    per_head = jnp.repeat(scales, heads.shape[1] // scales.shape[0])
    return (heads.astype(jnp.float32) * per_head[:, None]).astype(heads.dtype)
