"""The operation in C. The C code reads the batch directly, so a step has no metadata to compute."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import reference
from pallas_kernels.cpu import library
from pallas_kernels.cpu.library import ATTEND
from pallas_kernels.errors import UnavailableError
from pallas_kernels.spec import AttentionSpec, RaggedBatch

# The pages have the memory of the reference's. In a page, each 16 tokens of a head's keys are [H, 16].
PAGE_AXIS, KV_HEAD_AXIS, kv_pages = reference.PAGE_AXIS, reference.KV_HEAD_AXIS, reference.kv_pages
PIECE = 16  # tokens of a piece; pages are cut into pieces (attention.c)
MAX_HEAD_DIM = 256
MAX_GROUP = 64  # query heads per KV head


def validate(spec: AttentionSpec) -> None:
    """Raises UnavailableError if the C code does not support `spec`. The reference has no such limits."""
    if spec.page_size % PIECE:
        raise UnavailableError(f"pages have whole {PIECE}s of tokens, not {spec.page_size}")
    if spec.head_dim % PIECE or spec.head_dim > MAX_HEAD_DIM:
        raise UnavailableError(f"heads have whole {PIECE}s of dimensions up to {MAX_HEAD_DIM}, not {spec.head_dim}")
    group = spec.num_query_heads // spec.num_kv_heads
    if group > MAX_GROUP:
        raise UnavailableError(f"a KV head has up to {MAX_GROUP} query heads, not {group}")
    if jnp.dtype(spec.dtype) not in (jnp.float32, jnp.bfloat16):
        raise UnavailableError(f"activations are float32 or bfloat16, not {jnp.dtype(spec.dtype)}")
    if jnp.dtype(spec.kv_dtype) not in (jnp.dtype(spec.dtype), jnp.int8):
        raise UnavailableError(f"K/V are of the activations' dtype or int8, not {jnp.dtype(spec.kv_dtype)}")


def make_metadata(batch: RaggedBatch, spec: AttentionSpec, **static: object) -> RaggedBatch:
    """The batch itself, which the C code reads."""
    return batch


def append_and_attend(
    queries: jax.Array,  # [T, N, H]
    keys: jax.Array,  # [T, K, H]
    values: jax.Array,  # [T, K, H]
    kv_pages: jax.Array,  # [2, P, K, page, H]; in memory, each 16 tokens of keys are [H, 16]
    metadata: RaggedBatch,
    first_page: jax.Array | int,
    *,
    spec: AttentionSpec,
) -> tuple[jax.Array, jax.Array]:
    """Appends the step's K/V to the pages, and attends over them. Returns the output [T, N, H] and the pages."""
    results = tuple(jax.ShapeDtypeStruct(like.shape, like.dtype) for like in (queries, kv_pages))
    call = library.function(ATTEND, results, input_output_aliases={3: 1})
    out, kv_pages = call(
        queries,
        keys,
        values,
        kv_pages,
        metadata.page_table,
        metadata.kv_lens,
        metadata.query_starts,
        metadata.num_rows,
        jnp.int32(first_page),
        scale=np.float32(spec.scale),
    )
    return out, kv_pages
