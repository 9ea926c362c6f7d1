"""The lanes of a block of queries, keys or outputs: their rotation, their scales, and the halves in which heads of 64
lie.

In head dim 64, a lane block holds query heads 2i and 2i + 1, and a plane the K of two KV heads (or the K and the V of
one). A query is moved into the half of its K, with zeros in the other half. Its output comes in the half of its V, and
is moved back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import quantised
from pallas_kernels.tpu.layout import LANES, Geometry


def rotation_columns(cos: jax.Array, sin: jax.Array, g: Geometry) -> jax.Array:
    """cos and sin, f32[T, 1, H / 2] -> f32[T, 256]: the factors of a block's lanes, and those of their partners."""
    per_head = jnp.concatenate([cos, cos], axis=-1)[:, 0], jnp.concatenate([-sin, sin], axis=-1)[:, 0]
    return jnp.concatenate([jnp.tile(x, (1, LANES // g.head_dim)) for x in per_head], axis=-1)


def rotate(x: jax.Array, rotation: jax.Array, g: Geometry) -> jax.Array:
    """f32[n, 128]: turns each pair (i, i + H / 2) of every head in [n, 128]; `rotation` is f32[n or 1, 256]."""
    x = x.astype(jnp.float32)
    half = g.head_dim // 2
    partners = pltpu.roll(x, half, 1)
    if g.head_dim < LANES:
        lane = lax.broadcasted_iota(jnp.int32, x.shape, 1)
        partners = jnp.where(lax.rem(lane, g.head_dim) < half, pltpu.roll(x, LANES - half, 1), partners)
    return x * rotation[:, :LANES] + partners * rotation[:, LANES:]


def scales_of_planes(kv_scales: Any | None, planes: Sequence[Any], g: Geometry) -> list[jax.Array] | list[None]:
    """The scales f32[1, 128] of each plane's lanes. They are None if `kv_scales`, f32[2K] in SMEM, is None."""
    if kv_scales is None:
        return [None] * len(planes)
    return [_scales_of_plane(kv_scales, plane, g) for plane in planes]


def _scales_of_plane(kv_scales: Any, plane: Any, g: Geometry) -> jax.Array:
    first = plane * g.heads_per_plane
    own = jnp.full((1, LANES), kv_scales[first], jnp.float32)
    if g.head_dim == LANES:
        return own
    second = first + (g.num_k_planes if g.kv_shared else 1)  # the scale of its V, or of the plane's other head
    lane = lax.broadcasted_iota(jnp.int32, own.shape, 1)
    return jnp.where(lane < g.head_dim, own, jnp.full((1, LANES), kv_scales[second], jnp.float32))


def stored(x: jax.Array, scales: jax.Array | None, g: Geometry) -> jax.Array:
    """[n, 128] of K or V as pages hold them; see `pallas_kernels.quantised.quantise`."""
    if scales is None:
        return x.astype(g.kv_dtype)
    largest = quantised.LARGEST[g.kv_dtype]
    units = jnp.clip(x.astype(jnp.float32) * (1.0 / scales), -largest, largest)
    return jnp.round(units).astype(jnp.int32).astype(g.kv_dtype)


def heads_of_block(x: jax.Array, block: Any, g: Geometry, scales: jax.Array | None = None) -> list[jax.Array]:
    """f32[n, 128] of the plane's block `block`, i32 or i32[n, 1] -> its query heads, each f32[n, 128].

    `scales` are those of the lanes of their K, f32[n or 1, 128]."""
    if g.head_dim == LANES:
        return [x if scales is None else x * scales]
    if g.head_lanes == LANES:  # a head of 64 in a block of its own has zeros in the other half already
        lane = lax.broadcasted_iota(jnp.int32, x.shape, 1)
        return [x if scales is None else jnp.where(lane < g.head_dim, x * scales, 0.0)]
    moved = pltpu.roll(x, g.head_dim, 1)
    lane_half = lax.div(lax.broadcasted_iota(jnp.int32, x.shape, 1), g.head_dim)
    heads = []
    for half in range(2):
        k_half = _kv_head(block, half, g)
        head = jnp.where(k_half == half, x, moved)
        heads.append(jnp.where(lane_half == k_half, head if scales is None else head * scales, 0.0))
    return heads


def block_of_heads(heads: list[jax.Array], block: Any, g: Geometry) -> jax.Array:
    """The inverse of `heads_of_block`, of outputs."""
    if g.head_dim == LANES or g.head_lanes == LANES:
        return heads[0]
    lane_half = lax.div(lax.broadcasted_iota(jnp.int32, heads[0].shape, 1), g.head_dim)
    back = []
    for half, head in enumerate(heads):
        v_half = jnp.int32(1) if g.kv_shared else _kv_head(block, half, g)
        back.append(jnp.where(v_half == half, head, pltpu.roll(head, g.head_dim, 1)))
    first, second = back
    return jnp.where(lane_half == 0, first, second)


def _kv_head(block: Any, half: int, g: Geometry) -> Any:
    """The KV head, of its plane, of the query head in this half of the plane's block."""
    return lax.div(2 * block + half, jnp.int32(g.queries_per_plane // g.heads_per_plane))
