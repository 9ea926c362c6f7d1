"""The layout of K and V in a page on a TPU.

A TPU register is 8 sublanes x 128 lanes x 32 bits, a copy engine moves whole 32-bit sublane rows, and the matrix unit
takes bf16 rows packed in such words in pairs. So a page is `uint32[planes, page_size / kv_packing, 128]`:

- One word row holds `kv_packing` consecutive tokens: one of float32, two of bf16, four of int8. The matrix unit reads
  it without any rearrangement (int8 is widened first), and one new token costs one row of 512 bytes per plane.
- A plane is 128 lanes of K or of V. head_dim 128: one head each. head_dim 64: two heads side by side, or K and V of one
  head side by side if the head count is odd, so nothing is padded. Queries have zeros in the lanes of other heads.
  Nothing else in the kernels depends on the head dim.

K planes come first, then V planes: plane `i` of K belongs to plane `i + num_k_planes` of V, or to itself if K and V
share planes. The plane axis is split over chips.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.spec import AttentionSpec

KV_HEAD_AXIS = 1
LANES = 128
MIN_PAGE_SIZE, MAX_PAGE_SIZE = 16, 256  # tokens; with 8 bits the smallest is 32, which fills a register


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The static shapes of one chip's kernels. They do not depend on the head dim."""

    num_k_planes: int
    kv_shared: bool  # K and V of a head lie in one plane
    heads_per_plane: int  # KV heads whose K lie in one plane
    queries_per_plane: int  # query rows of one token that attend over one plane, padding included
    query_packing: int  # query rows in a 32-bit word
    kv_packing: int  # tokens in a 32-bit word
    page_size: int  # tokens
    dtype: jnp.dtype  # of the queries, of products' operands and of the output
    kv_dtype: jnp.dtype
    scale: float

    @property
    def num_planes(self) -> int:
        """Planes of a page, of K and of V."""
        return self.num_k_planes if self.kv_shared else 2 * self.num_k_planes

    @property
    def page_words(self) -> int:
        """Word rows of one plane of a page."""
        return self.page_size // self.kv_packing

    def v_plane[I: (int, jax.Array)](self, k_plane: I) -> I:
        """The plane of the V that belong to the K of `k_plane`."""
        return k_plane if self.kv_shared else k_plane + self.num_k_planes


def geometry(spec: AttentionSpec) -> Geometry:
    """The geometry of one chip's `spec`."""
    shared = spec.head_dim == 64 and spec.num_kv_heads % 2 == 1
    heads_per_plane = 1 if shared else LANES // spec.head_dim
    query_packing = 4 // jnp.dtype(spec.dtype).itemsize
    queries = heads_per_plane * (spec.num_query_heads // spec.num_kv_heads)
    return Geometry(
        num_k_planes=spec.num_kv_heads // heads_per_plane,
        kv_shared=shared,
        heads_per_plane=heads_per_plane,
        # One token's rows fill whole words, so a block of queries may begin at any token.
        queries_per_plane=-(-queries // query_packing) * query_packing,
        query_packing=query_packing,
        kv_packing=4 // jnp.dtype(spec.kv_dtype).itemsize,
        page_size=spec.page_size,
        dtype=jnp.dtype(spec.dtype),
        kv_dtype=jnp.dtype(spec.kv_dtype),
        scale=spec.scale,
    )


def kv_pages(spec: AttentionSpec, num_pages: int) -> jax.ShapeDtypeStruct:
    """One layer's pages on one chip: uint32 words, whatever the K/V dtype."""
    g = geometry(spec)
    return jax.ShapeDtypeStruct((num_pages, g.num_planes, g.page_words, LANES), jnp.uint32)


def validate(spec: AttentionSpec) -> None:
    """Raises ValueError, before tracing, if these kernels do not support `spec`."""
    if spec.head_dim not in (64, 128):
        raise ValueError(f"the TPU kernel takes head_dim 64 or 128: {spec.head_dim=}")
    if jnp.dtype(spec.dtype) not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)):
        raise ValueError(f"the TPU kernel computes in bfloat16 (or float32, slowly): {spec.dtype=}")
    if jnp.dtype(spec.kv_dtype) not in (jnp.dtype(spec.dtype), jnp.dtype(jnp.int8)):
        raise ValueError(
            f"the TPU kernel stores K and V in the queries' dtype or in int8: {spec.kv_dtype=} {spec.dtype=}"
        )
    size, smallest = spec.page_size, 2 * MIN_PAGE_SIZE if spec.has_kv_scales else MIN_PAGE_SIZE
    if not smallest <= size <= MAX_PAGE_SIZE or size & (size - 1):
        raise ValueError(
            f"the TPU kernel takes pages of a power of two from {smallest} to {MAX_PAGE_SIZE} tokens of "
            f"{jnp.dtype(spec.kv_dtype)}: {spec.page_size=}"
        )


def to_planes(heads: jax.Array, g: Geometry) -> jax.Array:
    """[T, K, H] -> [T, num_k_planes, 128], for K and V that do not share a plane: heads side by side."""
    return heads.reshape(heads.shape[0], g.num_k_planes, LANES)


def kv_to_planes(keys: jax.Array, values: jax.Array, g: Geometry) -> jax.Array:
    """[T, K, H] twice -> [T, num_planes, 128]."""
    if g.kv_shared:
        return jnp.concatenate([keys, values], axis=-1)
    return jnp.concatenate([to_planes(keys, g), to_planes(values, g)], axis=1)


def queries_to_rows(queries: jax.Array, g: Geometry) -> jax.Array:
    """[T, N, H] -> [T, num_k_planes, queries_per_plane, 128]: each query in the lanes of its K, zeros elsewhere."""
    tokens, _, head_dim = queries.shape
    rows = queries.reshape(tokens, g.num_k_planes, g.heads_per_plane, -1, head_dim)
    if head_dim < LANES and g.heads_per_plane == 1:
        rows = jnp.pad(rows, ((0, 0),) * 4 + ((0, LANES - head_dim),))
    elif head_dim < LANES:
        lanes = [
            jnp.pad(rows[:, :, i], ((0, 0),) * 3 + ((i * head_dim, LANES - (i + 1) * head_dim),))
            for i in range(g.heads_per_plane)
        ]
        rows = jnp.stack(lanes, axis=2)
    rows = rows.reshape(tokens, g.num_k_planes, -1, LANES)
    return jnp.pad(rows, ((0, 0), (0, 0), (0, g.queries_per_plane - rows.shape[2]), (0, 0)))


def rows_to_heads(rows: jax.Array, g: Geometry, num_query_heads: int, head_dim: int) -> jax.Array:
    """The inverse of `queries_to_rows` for the output: [T, num_k_planes, queries_per_plane, 128] -> [T, N, H].

    The output of a head lies in the lanes of its V."""
    tokens = rows.shape[0]
    per_head = num_query_heads // (g.num_k_planes * g.heads_per_plane)
    rows = rows[:, :, : g.heads_per_plane * per_head]
    rows = rows.reshape(tokens, g.num_k_planes, g.heads_per_plane, per_head, LANES)
    if g.kv_shared:
        rows = rows[..., head_dim:]
    elif head_dim < LANES:
        lanes = [rows[:, :, i, :, i * head_dim : (i + 1) * head_dim] for i in range(g.heads_per_plane)]
        rows = jnp.stack(lanes, axis=2)
    return rows.reshape(tokens, num_query_heads, head_dim)
