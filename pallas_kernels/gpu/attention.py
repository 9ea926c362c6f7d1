"""The GPU backend of the operation in `api.py`: append the step's K/V to their pages, then attend over the pages.

Decode rows go through `decode` and `combine`, chunks of prompts through `prefill_hopper` or `prefill_mma`. All read the
work lists of `work_list`. Page ids are NOT checked: neither the chip nor the interpreter detects a wrong one.
`validate.page_table` checks them on the host; only tests call it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.chips import arch_converts_fp8
from pallas_kernels.gpu import append, combine, decode, device, prefill_hopper, prefill_mma, tuning, widening, work_list
from pallas_kernels.gpu.prefill_body import PrefillOperands
from pallas_kernels.gpu.work_list import TOKEN_ALIGNMENT
from pallas_kernels.spec import AttentionSpec, RaggedBatch

HEAD_DIMS = (64, 128)
PAGE_SIZES = (16, 32, 64, 128)  # tokens
INTERPRETER_THREADS = prefill_hopper.COMPUTE_WARPGROUPS + 2  # and one for the program around the kernel
DTYPES = (jnp.bfloat16, jnp.float16)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["page_table", "token_pages", "token_slots", "items", "row_items", "tiles", "num_tiles"],
    meta_fields=[],
)
@dataclass(frozen=True, kw_only=True)
class AttentionMetadata:
    """The arrays that the layers of one step share."""

    page_table: jax.Array  # i32[S, pages_per_seq]
    token_pages: jax.Array  # i32[T]; -1 for padding
    token_slots: jax.Array  # i32[T]
    items: jax.Array  # i32[W, work_list.ITEM_FIELDS]
    row_items: jax.Array  # i32[S, 2]
    tiles: jax.Array | None  # i32[NT, work_list.TILE_FIELDS] of prefill; None in a program that only decodes
    num_tiles: jax.Array | None  # i32[1]


def validate(spec: AttentionSpec) -> None:
    """Raises ValueError, before tracing, if these kernels do not support `spec`."""
    if spec.head_dim not in HEAD_DIMS:
        raise ValueError(f"the GPU kernels take head_dim in {HEAD_DIMS}: {spec.head_dim=}")
    if spec.page_size not in PAGE_SIZES:
        raise ValueError(f"the GPU kernels take page_size in {PAGE_SIZES}: {spec.page_size=}")
    if jnp.dtype(spec.dtype) not in [jnp.dtype(dtype) for dtype in DTYPES]:
        raise ValueError(f"the GPU kernels take bfloat16 or float16: {spec.dtype=}")
    arch = device.current().arch
    if jnp.dtype(spec.kv_dtype) == jnp.float8_e4m3fn and not arch_converts_fp8(arch):
        raise ValueError(f"this GPU has no instruction that converts fp8, use int8: {spec.kv_dtype=} {arch=}")
    group = spec.num_query_heads // spec.num_kv_heads
    if group > decode.TILE_M:
        raise ValueError(f"the GPU kernels take up to {decode.TILE_M} query heads per KV head: {group=}")


def make_metadata(
    batch: RaggedBatch, spec: AttentionSpec, *, num_tokens: int, decode_only: bool, mma_only: bool = False
) -> AttentionMetadata:
    """See `pallas_kernels.api.PagedAttention.make_metadata`. `mma_only`: see `device.Gpu`."""
    gpu = replace(device.current(), mma_only=mma_only)
    block_kv = tuning.decode_tiles(gpu, spec).block_kv
    row = jnp.arange(batch.kv_lens.shape[0])
    # In a program that only decodes, padding rows get an item too: it writes zeros.
    decoding = row < (batch.kv_lens.shape[0] if decode_only else batch.num_singles)
    items, row_items = work_list.decode_items(
        batch.kv_lens,
        decoding,
        block_kv=block_kv,
        max_blocks=-(-batch.page_table.shape[1] * spec.page_size // block_kv),
        num_kv_heads=spec.num_kv_heads,
        resident_ctas=tuning.resident_decode_ctas(gpu, spec),
    )
    pages, slots = append.destinations(
        batch.page_table, batch.kv_lens, batch.query_starts, num_tokens=num_tokens, page_size=spec.page_size
    )
    tiles = num_tiles = None
    if not decode_only:
        tile_tokens = tuning.prefill_tile_tokens(gpu, spec)
        tiles, num_tiles = work_list.prefill_tiles(
            batch.kv_lens,
            batch.query_starts,
            batch.num_singles,
            num_tokens=_padded_tokens(num_tokens, tile_tokens),
            tile_tokens=tile_tokens,
        )
    return AttentionMetadata(
        page_table=batch.page_table,
        token_pages=pages,
        token_slots=slots,
        items=items,
        row_items=row_items,
        tiles=tiles,
        num_tiles=num_tiles,
    )


def _padded_tokens(num_tokens: int, tile_tokens: int) -> int:
    """The copy engine loads whole tiles, so steps of other sizes are padded. A server's buckets need no padding."""
    return max(tile_tokens, -(-num_tokens // TOKEN_ALIGNMENT) * TOKEN_ALIGNMENT)


def append_and_attend(
    queries: jax.Array,  # [T, N, H]
    keys: jax.Array,  # [T, K, H]
    values: jax.Array,  # [T, K, H]
    kv_pages: jax.Array,  # [P, 2, K, page, H]
    metadata: AttentionMetadata,
    first_page: jax.Array | int,
    *,
    spec: AttentionSpec,
    interpret: Any,  # bool, or the interpreter's parameters
    mma_only: bool = False,  # as for `make_metadata`
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.api.PagedAttention.__call__`. `interpret` runs the same kernels on a CPU."""
    first_page = jnp.asarray(first_page, jnp.int32)
    is_padding = metadata.token_pages < 0
    beyond = kv_pages.shape[0] + jnp.arange(queries.shape[0], dtype=jnp.int32)
    pages = jnp.where(is_padding, beyond, metadata.token_pages + first_page)
    kv_pages = append.append(kv_pages, keys, values, pages, metadata.token_slots)
    gpu = replace(device.current(), mma_only=mma_only)
    options = {"spec": spec, "gpu": gpu, "interpret": _interpreter(interpret)}
    queries = queries.astype(widening.product_dtype(spec.dtype, spec.kv_dtype))
    output = attend(queries, kv_pages, metadata, first_page.reshape(1), **options)
    return output.astype(spec.dtype), kv_pages


def _interpreter(interpret: Any) -> Any:
    """The interpreter's parameters, or None to compile.

    Raises:
        ValueError: the interpreter would hang. It runs the warpgroups of a CTA at the same time, each in a thread of
            XLA's CPU client, which has as many threads as there are processors or, if more, CPU devices.
    """
    if not interpret:
        return None
    threads = max(os.cpu_count() or 1, jax.device_count("cpu"))
    if threads < INTERPRETER_THREADS:
        raise ValueError(
            f"interpreting the GPU kernels takes {INTERPRETER_THREADS} threads of XLA's, here there are {threads}: "
            f"set XLA_FLAGS=--xla_force_host_platform_device_count={INTERPRETER_THREADS}"
        )
    return plgpu.InterpretGPUParams() if interpret is True else interpret


def attend(
    queries: jax.Array,  # [T, N, H]
    kv_pages: jax.Array,  # [P, 2, K, page, H], this step's tokens in them
    metadata: AttentionMetadata,
    first_page: jax.Array,  # i32[1]
    *,
    spec: AttentionSpec,
    gpu: device.Gpu,
    interpret: Any,  # plgpu.InterpretGPUParams or None
) -> jax.Array:
    """The attention output [T, N, H] over pages that hold this step's tokens already."""
    num_tokens, num_heads, _ = queries.shape
    decode_only = metadata.tiles is None
    if decode_only:  # at least 16 rows; only tiny tests have fewer
        padded_tokens = max(num_tokens, -(-decode.TILE_M // num_heads))
    else:
        padded_tokens = _padded_tokens(num_tokens, tuning.prefill_tile_tokens(gpu, spec))
    queries = jnp.pad(queries, ((0, padded_tokens - num_tokens), (0, 0), (0, 0)))
    output = _decode(queries, kv_pages, metadata, first_page, spec=spec, gpu=gpu, interpret=interpret)
    if not decode_only:
        output = _prefill(output, queries, kv_pages, metadata, first_page, spec=spec, gpu=gpu, interpret=interpret)
    return output.reshape(queries.shape)[:num_tokens]


def _decode(queries, kv_pages, metadata: AttentionMetadata, first_page, *, spec, gpu, interpret) -> jax.Array:
    """[T * N, H]; only the decode rows are written."""
    _, num_heads, head_dim = queries.shape
    operands = decode.Operands(queries.reshape(-1, head_dim), kv_pages, metadata.page_table, first_page, metadata.items)
    output, partial_results, sums = decode.decode(
        operands,
        num_query_heads=num_heads,
        scale=spec.scale,
        tiles=tuning.decode_tiles(gpu, spec),
        interpret=interpret,
    )
    output_ref = jax.new_ref(output)
    combine.combine(
        output_ref, partial_results, sums, metadata.row_items, num_query_heads=num_heads, interpret=interpret
    )
    return jax.freeze(output_ref)


def _prefill(output, queries, kv_pages, metadata: AttentionMetadata, first_page, *, spec, gpu, interpret) -> jax.Array:
    """[T, N * H]: `output` with the chunks' rows, and with zeros after the last token."""
    num_tokens = queries.shape[0]
    output_ref = jax.new_ref(output.reshape(num_tokens, -1))
    assert metadata.tiles is not None and metadata.num_tiles is not None
    operands = PrefillOperands(
        queries.reshape(num_tokens, -1), kv_pages, metadata.page_table, first_page, metadata.tiles, metadata.num_tiles
    )
    options = {"scale": spec.scale, "num_ctas": tuning.prefill_ctas(gpu, spec), "interpret": interpret}
    if gpu.has_wgmma:
        prefill_hopper.prefill(output_ref, operands, sizes=tuning.hopper_prefill_tiles(spec), **options)
    else:
        prefill_mma.prefill(output_ref, operands, sizes=tuning.mma_prefill_tiles(gpu, spec), **options)
    return jax.freeze(output_ref)
