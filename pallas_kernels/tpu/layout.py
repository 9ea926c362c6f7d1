"""The layouts on a TPU: of K and V in a page, and of a step's tokens.

A TPU register is 8 sublanes x 128 lanes x 32 bits, a copy engine moves whole 32-bit sublane rows, and the matrix unit
takes bf16 rows packed in such words in pairs. So a page is `uint32[planes, page_size / kv_packing, 128]`:

- One word row holds `kv_packing` consecutive tokens: one of float32, two of bf16, four of int8. The matrix unit reads
  it without any rearrangement (int8 is converted first), and one new token costs one row of 512 bytes per plane.
- A plane is 128 lanes of K or of V. head_dim 128: one head each. head_dim 64: two heads side by side, or K and V of one
  head side by side if the head count is odd, so nothing is padded. Queries have zeros in the lanes of other heads.
  Nothing else in the kernels depends on the head dim.

K planes come first, then V planes: plane `i` of K belongs to plane `i + num_k_planes` of V, or to itself if K and V
share planes. The plane axis is split over chips.

A step's tokens keep the layout in which the products with weights make them and take them: `[T, columns]`, one token in
a row. A row has the queries of all heads, head after head, or the planes of its K and V. 128 columns are a lane block,
and a plane attends with whole blocks. In head dim 64 a block holds two query heads; the kernels move each into the
lanes of its K. The copies of rows have whole tiles of `token_tile` tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.errors import UnavailableError
from pallas_kernels.spec import AttentionSpec

KV_HEAD_AXIS = 1
LANES = 128
MIN_PAGE_SIZE, MAX_PAGE_SIZE = 16, 256  # tokens; with 8 bits the smallest is 32, which fills a register


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The static shapes of one chip's kernels."""

    num_k_planes: int
    kv_shared: bool  # K and V of a head lie in one plane
    heads_per_plane: int  # KV heads whose K lie in one plane
    queries_per_plane: int  # query heads that attend over one plane
    head_dim: int
    head_lanes: int  # of a query head in its lane block: 128, or 64 if two heads share a block
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

    @property
    def plane_blocks(self) -> int:
        """Lane blocks of the query heads that attend over one plane."""
        return self.queries_per_plane * self.head_lanes // LANES

    @property
    def query_columns(self) -> int:
        """Columns of a token's queries, and of its output."""
        return self.num_k_planes * self.plane_blocks * LANES

    @property
    def kv_columns(self) -> int:
        """Columns of a token's K and V."""
        return self.num_planes * LANES

    @property
    def query_packing(self) -> int:
        """Tokens in a 32-bit word of the queries."""
        return 4 // self.dtype.itemsize

    @property
    def token_tile(self) -> int:
        """Tokens that fill a register tile in every dtype of the step's tokens."""
        return 8 * max(self.query_packing, 2)

    @property
    def pack_tile(self) -> int:
        """Tokens whose K or V fill a register tile as pages hold them: whole tiles of tokens."""
        return max(8 * self.kv_packing, self.token_tile)

    def v_plane[I: (int, jax.Array)](self, k_plane: I) -> I:
        """The plane of the V that belong to the K of `k_plane`."""
        return k_plane if self.kv_shared else k_plane + self.num_k_planes


def geometry(spec: AttentionSpec) -> Geometry:
    """The geometry of one chip's `spec`."""
    shared = spec.head_dim == 64 and spec.num_kv_heads % 2 == 1
    heads_per_plane = 1 if shared else LANES // spec.head_dim
    queries = heads_per_plane * (spec.num_query_heads // spec.num_kv_heads)
    return Geometry(
        num_k_planes=spec.num_kv_heads // heads_per_plane,
        kv_shared=shared,
        heads_per_plane=heads_per_plane,
        queries_per_plane=queries,
        head_dim=spec.head_dim,
        head_lanes=spec.head_dim if queries % 2 == 0 else LANES,  # two heads of a block attend over the same plane
        kv_packing=4 // jnp.dtype(spec.kv_dtype).itemsize,
        page_size=spec.page_size,
        dtype=jnp.dtype(spec.dtype),
        kv_dtype=jnp.dtype(spec.kv_dtype),
        scale=spec.scale,
    )


def kv_pages(spec: AttentionSpec, num_pages: int) -> jax.ShapeDtypeStruct:
    """The shape and dtype of one layer's pages on one chip. They are uint32 words for every K/V dtype."""
    g = geometry(spec)
    return jax.ShapeDtypeStruct((num_pages, g.num_planes, g.page_words, LANES), jnp.uint32)


def validate(spec: AttentionSpec) -> None:
    """Raises UnavailableError, before tracing, if these kernels do not support `spec`."""
    if spec.head_dim not in (64, 128):
        raise UnavailableError(f"the TPU kernel takes head_dim 64 or 128: {spec.head_dim=}")
    if jnp.dtype(spec.dtype) not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)):
        raise UnavailableError(f"the TPU kernel computes in bfloat16 (or float32, slowly): {spec.dtype=}")
    if jnp.dtype(spec.kv_dtype) not in (jnp.dtype(spec.dtype), jnp.dtype(jnp.int8)):
        raise UnavailableError(
            f"the TPU kernel stores K and V in the queries' dtype or in int8: {spec.kv_dtype=} {spec.dtype=}"
        )
    size, smallest = spec.page_size, 2 * MIN_PAGE_SIZE if spec.has_kv_scales else MIN_PAGE_SIZE
    if not smallest <= size <= MAX_PAGE_SIZE or size & (size - 1):
        raise UnavailableError(
            f"the TPU kernel takes pages of a power of two from {smallest} to {MAX_PAGE_SIZE} tokens of "
            f"{jnp.dtype(spec.kv_dtype)}: {spec.page_size=}"
        )


def kv_to_columns(keys: jax.Array, values: jax.Array, g: Geometry) -> jax.Array:
    """[T, K, H] twice -> [T, kv_columns]."""
    both = jnp.concatenate([keys, values], axis=-1 if g.kv_shared else 1)
    return both.reshape(keys.shape[0], g.kv_columns)


def queries_to_columns(queries: jax.Array, g: Geometry) -> jax.Array:
    """[T, N, H] -> [T, query_columns]."""
    padded = jnp.pad(queries, ((0, 0), (0, 0), (0, g.head_lanes - g.head_dim)))
    return padded.reshape(queries.shape[0], g.query_columns)


def columns_to_heads(columns: jax.Array, g: Geometry) -> jax.Array:
    """[T, query_columns] of the output -> [T, N, H]."""
    heads = columns.reshape(columns.shape[0], -1, g.head_lanes)
    return heads[..., g.head_lanes - g.head_dim :]  # of a plane with K and V, the V are behind
