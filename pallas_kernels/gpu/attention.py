"""The GPU backend of the operation in `api.py`: append the step's K/V to their pages, then attend over the pages.

`decode` computes decode rows, and `prefill_hopper` or `prefill_mma` computes chunks of prompts. If rows may be cut into
parts, `combine` merges the parts after both. The kernels read the lists of `work_list` and `tile_list`. Page ids are
NOT checked: neither the chip nor the interpreter detects a wrong one. `validate.page_table` checks them on the host;
only tests call it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.chips import arch_converts_fp8
from pallas_kernels.errors import UnavailableError
from pallas_kernels.gpu import (
    append,
    combine,
    conversion,
    decode,
    device,
    prefill_hopper,
    prefill_memory,
    prefill_mma,
    tuning,
)
from pallas_kernels.gpu.parts import NO_PARTS, Parts
from pallas_kernels.gpu.prefill_body import PrefillOperands
from pallas_kernels.gpu.prefill_tile import TileShape
from pallas_kernels.gpu.tile_list import TOKEN_ALIGNMENT, TileList, prefill_tiles
from pallas_kernels.gpu.work_list import ItemList, decode_items
from pallas_kernels.spec import AttentionSpec, RaggedBatch

PAGE_AXIS, KV_HEAD_AXIS = 0, 2
HEAD_DIMS = (64, 128)
PAGE_SIZES = (16, 32, 64, 128)  # tokens
INTERPRETER_THREADS = prefill_memory.COMPUTE_WARPGROUPS + 2  # plus the memory warpgroup, and the program around it
DTYPES = (jnp.bfloat16, jnp.float16)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class AttentionMetadata:
    """The arrays that the layers of one step share."""

    page_table: jax.Array  # i32[S, pages_per_seq]
    token_pages: jax.Array  # i32[T]; -1 for padding
    token_slots: jax.Array  # i32[T]
    decode: ItemList | None  # None: the program has no decode kernel
    decode_parts: Parts = jax.tree.static()
    prefill: TileList | None  # None: the program only decodes
    prefill_parts: Parts = jax.tree.static()


def validate(spec: AttentionSpec) -> None:
    """Raises UnavailableError, before tracing, if these kernels do not support `spec`."""
    if spec.head_dim not in HEAD_DIMS:
        raise UnavailableError(f"the GPU kernels take head_dim in {HEAD_DIMS}: {spec.head_dim=}")
    if spec.page_size not in PAGE_SIZES:
        raise UnavailableError(f"the GPU kernels take page_size in {PAGE_SIZES}: {spec.page_size=}")
    if jnp.dtype(spec.dtype) not in [jnp.dtype(dtype) for dtype in DTYPES]:
        raise UnavailableError(f"the GPU kernels take bfloat16 or float16: {spec.dtype=}")
    arch = device.current().arch
    if jnp.dtype(spec.kv_dtype) == jnp.float8_e4m3fn and not arch_converts_fp8(arch):
        raise UnavailableError(f"this GPU has no instruction that converts fp8, use int8: {spec.kv_dtype=} {arch=}")
    group = spec.num_query_heads // spec.num_kv_heads
    if group > decode.TILE_M:
        raise UnavailableError(f"the GPU kernels take up to {decode.TILE_M} query heads per KV head: {group=}")


def kv_pages(spec: AttentionSpec, num_pages: int) -> jax.ShapeDtypeStruct:
    """The shape and dtype of one layer's pages on one chip. One page of one head is one box of the copy engine:
    contiguous."""
    shape = (num_pages, 2, spec.num_kv_heads, spec.page_size, spec.head_dim)
    return jax.ShapeDtypeStruct(shape, jnp.dtype(spec.kv_dtype))


def make_metadata(
    batch: RaggedBatch,
    spec: AttentionSpec,
    *,
    num_tokens: int,
    decode_only: bool,
    spec_decode: bool = False,
    mma_only: bool = False,
) -> AttentionMetadata:
    """The pages and offsets of the step's tokens, and the lists of its decode items and prefill tiles. Each layer of
    the step uses them.

    With `spec_decode`, prefill computes the single tokens, too: a tile of one query takes as long as a tile of a few,
    and the decode kernels are not launched. `mma_only` does not use Hopper's own instructions (`device.Gpu`).
    """
    gpu = replace(device.current(), mma_only=mma_only)
    num_rows, pages_per_seq = batch.page_table.shape
    max_keys = pages_per_seq * spec.page_size
    pages, slots = batch.destinations(num_tokens, spec.page_size)
    num_singles = jnp.zeros_like(batch.num_singles) if spec_decode and not decode_only else batch.num_singles
    decoding, decode_parts = None, NO_PARTS
    if decode_only or not spec_decode:
        decode_parts = tuning.decode_parts(gpu, spec, num_rows=num_rows, max_keys=max_keys)
        decoding = decode_items(
            batch.kv_lens,
            # In a program that only decodes, padding rows get an item too: it writes zeros.
            jnp.arange(num_rows) < (num_rows if decode_only else num_singles),
            block_kv=tuning.decode_tiles(gpu, spec).block_kv,
            parts=decode_parts,
        )
    prefill, prefill_parts = None, NO_PARTS
    if not decode_only:
        tile_tokens = tuning.prefill_tile_tokens(gpu, spec)
        prefill_parts = tuning.prefill_parts(gpu, spec, num_rows=num_rows, num_tokens=num_tokens, max_keys=max_keys)
        prefill = prefill_tiles(
            batch.kv_lens,
            batch.query_starts,
            num_singles,
            num_tokens=_padded_tokens(num_tokens, tile_tokens),
            tile_tokens=tile_tokens,
            block_kv=tuning.prefill_block_kv(gpu, spec),
            parts=prefill_parts,
        )
    return AttentionMetadata(
        page_table=batch.page_table,
        token_pages=pages,
        token_slots=slots,
        decode=decoding,
        decode_parts=decode_parts,
        prefill=prefill,
        prefill_parts=prefill_parts,
    )


def _padded_tokens(num_tokens: int, tile_tokens: int) -> int:
    """The padded number of tokens, because the copy engine loads whole tiles. A server's buckets need no padding."""
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
    mma_only: bool = False,  # the value that `make_metadata` had
) -> tuple[jax.Array, jax.Array]:
    """Appends the step's K/V to the pages, and attends over them. Returns the output [T, N, H] and the pages.
    `interpret` runs the same kernels on a CPU."""
    first_page = jnp.asarray(first_page, jnp.int32)
    is_padding = metadata.token_pages < 0
    beyond = kv_pages.shape[0] + jnp.arange(queries.shape[0], dtype=jnp.int32)
    pages = jnp.where(is_padding, beyond, metadata.token_pages + first_page)
    kv_pages = append.append(kv_pages, keys, values, pages, metadata.token_slots)
    gpu = replace(device.current(), mma_only=mma_only)
    options = {"spec": spec, "gpu": gpu, "interpret": _interpreter(interpret)}
    queries = queries.astype(conversion.product_dtype(spec.dtype, spec.kv_dtype))
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
    """The attention output [T, N, H] over pages that already hold this step's tokens."""
    num_tokens, num_heads, _ = queries.shape
    decode_only = metadata.prefill is None
    if decode_only:  # at least 16 rows; only tiny tests have fewer
        padded_tokens = max(num_tokens, -(-decode.TILE_M // num_heads))
    else:
        padded_tokens = _padded_tokens(num_tokens, tuning.prefill_tile_tokens(gpu, spec))
    queries = jnp.pad(queries, ((0, padded_tokens - num_tokens), (0, 0), (0, 0)))
    options = {"spec": spec, "gpu": gpu, "interpret": interpret}
    output_ref, cut = None, []
    if metadata.decode is not None:
        output, *partial_results = _decode(queries, kv_pages, metadata, first_page, **options)
        output_ref = jax.new_ref(output.reshape(padded_tokens, -1))
        place = combine.place_of_decode(
            decode.GroupRows(padded_tokens * num_heads, num_heads, num_heads // spec.num_kv_heads)
        )
        cut += _to_merge(partial_results, metadata.decode, place, metadata.decode_parts)
    if metadata.prefill is not None:
        output_ref, partial_results = _prefill(output_ref, queries, kv_pages, metadata, first_page, **options)
        place = combine.place_of_prefill(TileShape(num_heads // spec.num_kv_heads))
        cut += _to_merge(partial_results, metadata.prefill, place, metadata.prefill_parts)
    if cut:
        combine.combine(
            output_ref, cut, group=num_heads // spec.num_kv_heads, head_dim=spec.head_dim,
            num_ctas=tuning.merging_ctas(gpu), interpret=interpret,
        )  # fmt: skip
    assert output_ref is not None
    return jax.freeze(output_ref).reshape(queries.shape)[:num_tokens]


def _decode(
    queries: jax.Array,
    kv_pages: jax.Array,
    metadata: AttentionMetadata,
    first_page: jax.Array,
    *,
    spec: AttentionSpec,
    gpu: device.Gpu,
    interpret: Any,
) -> tuple[jax.Array, ...]:
    """The output [T * N, H], in which only the decode rows are written, and the partial results, if rows may be cut."""
    _, num_heads, head_dim = queries.shape
    work = metadata.decode
    assert work is not None
    operands = decode.Operands(
        queries.reshape(-1, head_dim), kv_pages, metadata.page_table, first_page, work.items, work.num_items
    )
    return decode.decode(
        operands,
        num_query_heads=num_heads,
        scale=spec.scale,
        tiles=tuning.decode_tiles(gpu, spec),
        num_ctas=tuning.decode_ctas(gpu, spec),
        parts=metadata.decode_parts,
        interpret=interpret,
    )


def _prefill(
    output_ref: Any,
    queries: jax.Array,
    kv_pages: jax.Array,
    metadata: AttentionMetadata,
    first_page: jax.Array,
    *,
    spec: AttentionSpec,
    gpu: device.Gpu,
    interpret: Any,
) -> tuple[Any, list[jax.Array]]:
    """Writes the rows of the chunks to the output, and zeros after the last token. Returns the output, a Ref [T, N *
    H], and the partial results, if rows may be cut.

    Args:
        output_ref: the output of the decodes, whose rows are kept; None: a new output is made.
    """
    num_tokens, work = queries.shape[0], metadata.prefill
    assert work is not None
    operands = PrefillOperands(
        queries.reshape(num_tokens, -1), kv_pages, metadata.page_table, first_page, work.tiles, work.num_tiles
    )
    options: dict[str, Any] = {
        "scale": spec.scale, "num_ctas": tuning.prefill_ctas(gpu, spec), "parts": metadata.prefill_parts,
        "interpret": interpret,
    }  # fmt: skip
    if gpu.has_wgmma:
        results = list(prefill_hopper.prefill(output_ref, operands, sizes=tuning.hopper_prefill_tiles(spec), **options))
    else:
        sizes = tuning.mma_prefill_tiles(gpu, spec)
        results = list(prefill_mma.prefill(output_ref, operands, sizes=sizes, **options))
    if output_ref is None:
        output_ref = jax.new_ref(results.pop(0))
    return output_ref, results


def _to_merge(
    partial_results: Sequence[jax.Array], work: ItemList | TileList, place: combine.Place, parts: Parts
) -> list[combine.PartialResults]:
    """The partial results of one kernel that `combine` merges; empty if the program cuts no rows."""
    if not parts.num_slots:
        return []
    assert work.merges is not None and work.num_merges is not None
    results, sums = partial_results
    return [
        combine.PartialResults(
            results=results, sums=sums, merges=work.merges, num_merges=work.num_merges, place=place, parts=parts
        )
    ]
