"""The operation over the ragged paged attention that JAX ships for TPUs.

An engine uses it if the other TPU kernels do not support the model or fail their self-test. JAX's kernel takes rotated
queries. It does not append: an XLA scatter writes the step's keys and values to their pages.

A page is `[page_size, 2 K, 128]`: the keys and values of a KV head are neighbours, and a smaller head ends in zeros.
The kernel converts 8-bit values to the queries' dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import ragged_paged_attention as shipped
from jax.experimental.pallas.ops.tpu.ragged_paged_attention.kernel import get_min_heads_per_blk

from pallas_kernels.errors import UnavailableError
from pallas_kernels.spec import AttentionSpec, RaggedBatch

PAGE_AXIS, KV_HEAD_AXIS = 0, 2
LANES = 128
PAGE_SIZES = range(8, 513)  # tokens
BLOCK_TOKENS, BLOCK_QUERIES = 512, 32
MAX_BLOCK_PAGES = 16  # a page's address takes one of 32 scalar registers
VMEM_BYTES = 32 << 20  # half of the smallest that a chip has
MAX_HEADS = 128  # query heads that a block may have in this memory
NOWHERE = jnp.iinfo(jnp.int32).max  # past every page


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class AttentionMetadata:
    """The arrays that all layers of a step share."""

    batch: RaggedBatch  # with one row and one token at least
    token_pages: jax.Array  # i32[T]; -1 for padding
    token_slots: jax.Array  # i32[T]


def kv_pages(spec: AttentionSpec, num_pages: int) -> jax.ShapeDtypeStruct:
    """The shape and dtype of one layer's pages on one chip."""
    return jax.ShapeDtypeStruct((num_pages, spec.page_size, 2 * spec.num_kv_heads, LANES), jnp.dtype(spec.kv_dtype))


def validate(spec: AttentionSpec) -> None:
    """Raises UnavailableError, before tracing, if JAX's kernel does not support `spec`."""
    if spec.head_dim > LANES:
        raise UnavailableError(f"JAX's TPU kernel takes head_dim up to {LANES}: {spec.head_dim=}")
    if spec.page_size not in PAGE_SIZES:
        sizes = f"{PAGE_SIZES[0]} to {PAGE_SIZES[-1]}"
        raise UnavailableError(f"JAX's TPU kernel takes pages of {sizes} tokens: {spec.page_size=}")
    if jnp.dtype(spec.dtype) not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)):
        raise UnavailableError(f"JAX's TPU kernel computes in bfloat16 or float32: {spec.dtype=}")
    try:
        heads, _ = get_min_heads_per_blk(spec.num_query_heads, 2 * spec.num_kv_heads, spec.dtype, spec.kv_dtype)
    except ValueError as error:
        raise UnavailableError(
            f"JAX's TPU kernel takes KV heads that fill whole tiles, such as 2, 4 or 8 on each chip: "
            f"{spec.num_kv_heads=} {spec.kv_dtype=}"
        ) from error
    if heads > MAX_HEADS:
        raise UnavailableError(f"JAX's TPU kernel takes up to {MAX_HEADS} query heads in a block, not {heads}")


def make_metadata(batch: RaggedBatch, spec: AttentionSpec, *, num_tokens: int, **static: object) -> AttentionMetadata:
    """The pages of the step's tokens. The kernel needs nothing else besides the batch.

    It starts to read the pages of the first row even if there is no row, and would end before they have arrived. So an
    empty step computes one token over the null page.
    """
    pages, slots = batch.destinations(num_tokens, spec.page_size)
    one_at_least = RaggedBatch(
        page_table=batch.page_table,
        kv_lens=jnp.maximum(batch.kv_lens, 1),
        query_starts=batch.query_starts.at[1:].max(1),
        num_singles=batch.num_singles,
        num_rows=jnp.maximum(batch.num_rows, 1),
    )
    return AttentionMetadata(batch=one_at_least, token_pages=pages, token_slots=slots)


def append_and_attend(
    queries: jax.Array,  # [T, N, H]
    keys: jax.Array,  # [T, K, H]
    values: jax.Array,  # [T, K, H]
    kv_pages: jax.Array,  # [P, page, 2 K, 128]
    metadata: AttentionMetadata,
    first_page: jax.Array | int,
    *,
    spec: AttentionSpec,
) -> tuple[jax.Array, jax.Array]:
    """Appends the step's K/V to the pages, and attends over them. Returns the output [T, N, H] and the pages."""
    both = jnp.stack([keys, values], axis=2).reshape(keys.shape[0], -1, spec.head_dim)
    is_real = metadata.token_pages >= 0
    pages = jnp.where(is_real, metadata.token_pages + first_page, NOWHERE)
    kv_pages = kv_pages.at[pages, metadata.token_slots].set(padded(both), mode="drop")
    output = attend(queries, kv_pages, metadata.batch, spec, first_page)
    # The kernel leaves the output of padding as its memory was.
    return jnp.where(is_real[:, None, None], output, 0), kv_pages


def attend(
    queries: jax.Array, kv_pages: jax.Array, batch: RaggedBatch, spec: AttentionSpec, first_page: jax.Array | int = 0
) -> jax.Array:
    """JAX's kernel: the output [T, N, H] of queries [T, N, H] over pages that hold the step's tokens."""
    ones = {"k_scale": 1.0, "v_scale": 1.0} if spec.has_kv_scales else {}  # asks for the conversion of 8-bit values
    output = shipped.ragged_paged_attention(
        padded(queries),
        kv_pages,
        batch.kv_lens,
        batch.page_table + first_page,
        batch.query_starts,
        batch.num_rows.reshape(1),
        sm_scale=spec.scale,
        num_kv_pages_per_block=min(batch.page_table.shape[1], MAX_BLOCK_PAGES, -(-BLOCK_TOKENS // spec.page_size)),
        num_queries_per_block=min(queries.shape[0], BLOCK_QUERIES),
        vmem_limit_bytes=VMEM_BYTES,
        **ones,
    )
    return output[..., : spec.head_dim]


def padded(heads: jax.Array) -> jax.Array:
    """[..., H] with zeros up to 128 lanes."""
    return jnp.pad(heads, [(0, 0)] * (heads.ndim - 1) + [(0, LANES - heads.shape[-1])])
