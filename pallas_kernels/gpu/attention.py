"""The GPU backend of the operation in `api.py`: append the step's K/V to their pages, then attend over the pages.

Decode rows go through `decode` and `combine`, chunks of prompts through `prefill`; both read the work lists of
`schedule`. Page ids are NOT checked on the device, where a wrong one is silently wrong (the interpreter does not notice
either): the host answers for them, in `validate.page_table`, which tests and debug runs call.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import append, combine, decode, device, schedule, tuning

if TYPE_CHECKING:
    from pallas_kernels.api import AttentionSpec, RaggedBatch

HEAD_DIMS = (64, 128)
PAGE_SIZES = (16, 32, 64, 128)  # tokens
DTYPES = (jnp.bfloat16, jnp.float16)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["page_table", "token_pages", "token_slots", "num_decodes", "items", "row_items", "tiles"],
    meta_fields=[],
)
@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What the layers of one step share."""

    page_table: jax.Array  # i32[S, pages_per_seq]
    token_pages: jax.Array  # i32[T]; -1 for padding
    token_slots: jax.Array  # i32[T]
    num_decodes: jax.Array  # i32[]
    items: jax.Array  # i32[W, schedule.ITEM_FIELDS]
    row_items: jax.Array  # i32[S, 2]
    tiles: jax.Array | None  # of prefill; None in a program that only decodes


def validate(spec: AttentionSpec) -> None:
    """ValueError for what these kernels do not do."""
    if spec.head_dim not in HEAD_DIMS:
        raise ValueError(f"the GPU kernels take head_dim in {HEAD_DIMS}: {spec.head_dim=}")
    if spec.page_size not in PAGE_SIZES:
        raise ValueError(f"the GPU kernels take page_size in {PAGE_SIZES}: {spec.page_size=}")
    if jnp.dtype(spec.dtype) not in [jnp.dtype(dtype) for dtype in DTYPES]:
        raise ValueError(f"the GPU kernels take bfloat16 or float16: {spec.dtype=}")
    group = spec.num_query_heads // spec.num_kv_heads
    if group > decode.TILE_M:
        raise ValueError(f"the GPU kernels take up to {decode.TILE_M} query heads per KV head: {group=}")


def make_schedule(batch: RaggedBatch, spec: AttentionSpec, *, num_tokens: int, decode_only: bool) -> Schedule:
    gpu = device.current()
    tiles = tuning.decode_tiles(gpu, spec)
    row = jnp.arange(batch.kv_lens.shape[0])
    pages_per_seq = batch.page_table.shape[1]
    decoding = row < (batch.num_rows if decode_only else batch.num_decodes)
    items, row_items = schedule.decode_items(
        jnp.where(decoding, batch.kv_lens, 0),
        block_kv=tiles.block_kv,
        max_blocks=-(-pages_per_seq * spec.page_size // tiles.block_kv),
        num_kv_heads=spec.num_kv_heads,
        resident_ctas=tuning.resident_decode_ctas(gpu, spec),
    )
    pages, slots = append.destinations(
        batch.page_table, batch.kv_lens, batch.query_starts, num_tokens=num_tokens, page_size=spec.page_size
    )
    return Schedule(
        page_table=batch.page_table,
        token_pages=pages,
        token_slots=slots,
        num_decodes=batch.num_decodes,
        items=items,
        row_items=row_items,
        tiles=None,
    )


def append_and_attend(
    queries: jax.Array,  # [T, N, H]
    keys: jax.Array,  # [T, K, H]
    values: jax.Array,  # [T, K, H]
    kv_pages: jax.Array,  # [P, 2, K, page, H]
    schedule: Schedule,
    first_page: jax.Array | int,
    *,
    spec: AttentionSpec,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    first_page = jnp.asarray(first_page, jnp.int32)
    is_padding = schedule.token_pages < 0
    beyond = kv_pages.shape[0] + jnp.arange(queries.shape[0], dtype=jnp.int32)
    pages = jnp.where(is_padding, beyond, schedule.token_pages + first_page)
    kv_pages = append.append(kv_pages, keys, values, pages, schedule.token_slots)
    attend = partial(
        _decode, kv_pages=kv_pages, schedule=schedule, first_page=first_page.reshape(1), spec=spec,
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )  # fmt: skip
    return attend(queries), kv_pages


def _decode(
    queries: jax.Array,  # [S, N, H]
    *,
    kv_pages: jax.Array,
    schedule: Schedule,
    first_page: jax.Array,
    spec: AttentionSpec,
    interpret: Any,
) -> jax.Array:
    num_rows, num_heads, head_dim = queries.shape
    flat = queries.reshape(num_rows * num_heads, head_dim)
    missing = max(0, decode.TILE_M - flat.shape[0])  # a few small rows: tiny tests, not serving
    flat = jnp.pad(flat, ((0, missing), (0, 0)))
    output, partial_results, sums = decode.decode(
        flat, kv_pages, schedule.page_table, first_page, schedule.items,
        num_query_heads=num_heads, scale=spec.scale, tiles=tuning.decode_tiles(device.current(), spec),
        interpret=interpret,
    )  # fmt: skip
    output_ref = jax.new_ref(output)
    combine.combine(
        output_ref, partial_results, sums, schedule.row_items, num_query_heads=num_heads, interpret=interpret
    )
    return jax.freeze(output_ref)[: num_rows * num_heads].reshape(queries.shape)
