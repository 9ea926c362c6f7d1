"""The mixed kernel's operands and scratch: their names, contents and sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu import paging, vmem
from pallas_kernels.tpu.layout import LANES, Geometry
from pallas_kernels.tpu.tiles import FewBlocks, MixedBlocks

SUM_ROWS = 16  # rows of ones below V^T: one bf16 register tile; the first is read
FIRST_TOKEN_ROW = paging.SUBLANES  # of `token_rows`: rows before it are loaded with those of the first tokens


class Operands(NamedTuple):
    """One layer's rows of any number of tokens. `T` is a multiple of `token_tile`."""

    queries: jax.Array  # [T, columns], of which the first `query_columns` are queries
    new_kv: jax.Array  # [T, columns], with K and V from `kv_column` on; the array of the queries, or another
    rotation: jax.Array | None  # f32[T, 256], see `lanes`; None if queries and keys are rotated
    kv_scales: jax.Array | None  # f32[2K], of the keys' heads and of the values'; None if pages have the queries' dtype
    out: jax.Array  # [T, query_columns] with the outputs of the single-token rows
    kv_pages: jax.Array  # uint32[P, planes, page_words, 128]
    kv_lens: jax.Array  # i32[S]
    query_starts: jax.Array  # i32[S + 1]
    new_pages: jax.Array  # i32[page slots]
    page_table: jax.Array  # i32[S * windows_per_seq, 1, 128]
    scalars: jax.Array  # i32[3]: the first row, the row past the last, first_page


@dataclass(frozen=True, kw_only=True)
class Refs:
    """The kernel's arguments. In buffers with two halves, copies fill or empty one half while the kernel works on the
    other."""

    # Scalars, in SMEM
    kv_lens: Any  # i32[S]
    query_starts: Any  # i32[S + 1]
    new_pages: Any  # i32[page slots]
    scalars: Any  # i32[3]
    kv_scales: Any | None  # f32[2K]
    # Inputs, in HBM
    page_table: Any  # i32[S * windows_per_seq, 1, 128]
    queries: Any  # [T, columns]
    new_kv: Any  # [T, columns]
    kv_column: int
    rotation: Any | None  # f32[T, 256]
    # Outputs, in HBM, aliased to inputs
    out: Any  # [T, query_columns]
    pages: Any  # uint32[P, planes, page_words, 128]
    # Scratch, in VMEM up to `edge`
    q_blocks: Any  # [2, q_block, query_columns]
    q_rotations: Any  # f32[2, q_block, 256]
    kv_blocks: Any  # uint32[2, planes, block_words, 128]
    # Of tiles of queries only: see `tiles.MixedBlocks`
    q_scaled: Any  # [num_k_planes, q_block * queries_per_plane, 128]: tiles; in each, head after head
    scores_even: Any  # f32[tile_tokens, tile_rows]
    scores_odd: Any
    unit_tops_even: Any  # f32[1, tile_rows]: the scores' maximum over tokens
    unit_tops_odd: Any
    v_t_even: Any  # [planes of a unit, 128 + SUM_ROWS, tile_tokens]
    v_t_odd: Any
    masks: Any  # f32[num_masks, tile_tokens, mask_rows]: MASKED or -MASKED
    tops: Any  # f32[num_k_planes + 1, tiles, 1, tile_rows]: the running maximum
    values: Any  # f32[num_k_planes + 1, tiles, 128 + SUM_ROWS, tile_rows]: the running sums, relative to `tops`
    # Of rows of few queries only: see `tiles.FewBlocks`
    token_rows: Any  # f32[query heads, 8 + q_block + slots, 128]: queries, or outputs, of the block's tokens
    spec_decode: Any  # [chunks, groups, group_rows, planes of a group * 128]
    few_tops: Any  # f32[chunks, groups, group_rows, 128]: the running maximum, sum and weighted values
    few_sums: Any
    few_values: Any
    # Of both
    out_blocks: Any  # [2, q_block, query_columns]
    out_tile: Any  # [token_tile, query_columns]: the tile that is not complete yet
    stage: Any  # [q_block + 2 * pack_tile, kv_columns]: a part's new tokens, after a tile of anything
    kv_rotation: Any  # f32[q_block + 2 * pack_tile, 256]: of the tokens in `stage`
    words: Any  # uint32[2, planes, (q_block + 2 * pack_tile) / kv_packing + 8, 128]
    edge: Any  # uint32[planes, 1, 128]
    table_windows: Any  # i32[2, 1, 1, 128] in SMEM
    out_rows: Any  # i32[2] in SMEM: rows that are being copied out of each half of out_blocks
    mask_phase: Any  # i32[1] in SMEM: the phase, and the tile's size, that `masks` were made for
    window_sems: Any
    kv_sems: Any
    q_sems: Any
    out_sems: Any
    append_sems: Any
    stage_sem: Any
    edge_sem: Any
    tile_sem: Any


OF_TILES = (
    "q_scaled scores_even scores_odd unit_tops_even unit_tops_odd v_t_even v_t_odd masks tops values mask_phase".split()
)
OF_FEW_QUERIES = "token_rows spec_decode few_tops few_sums few_values".split()


def absent(blocks: MixedBlocks | FewBlocks) -> list[str]:
    """The fields of `Refs` that the kernel of these blocks does not have."""
    return OF_TILES if isinstance(blocks, FewBlocks) else OF_FEW_QUERIES


def vmem_scratch(g: Geometry, blocks: MixedBlocks | FewBlocks) -> list[Any]:
    """The buffers from `Refs.q_blocks` to `Refs.edge`, without those that are absent."""
    staged = blocks.q_block + 2 * g.pack_tile
    return [
        pltpu.VMEM((2, blocks.q_block, g.query_columns), g.dtype),
        pltpu.VMEM((2, blocks.q_block, 2 * LANES), jnp.float32),
        pltpu.VMEM((2, g.num_planes, blocks.kv_block // g.kv_packing, LANES), jnp.uint32),
        *(_of_spec_decode(g, blocks) if isinstance(blocks, FewBlocks) else _of_tiles(g, blocks)),
        pltpu.VMEM((2, blocks.q_block, g.query_columns), g.dtype),
        pltpu.VMEM((g.token_tile, g.query_columns), g.dtype),
        pltpu.VMEM((staged, g.kv_columns), g.dtype),
        pltpu.VMEM((staged, 2 * LANES), jnp.float32),
        pltpu.VMEM((2, g.num_planes, staged // g.kv_packing + 8, LANES), jnp.uint32),
        pltpu.VMEM((g.num_planes, 1, LANES), jnp.uint32),
    ]


def _of_tiles(g: Geometry, blocks: MixedBlocks) -> list[Any]:
    tiles, narrow = blocks.max_q_tiles(g), blocks.narrow(g)
    planes = 1 if narrow is None else narrow.planes_of_unit(g)
    return [
        pltpu.VMEM((g.num_k_planes, blocks.q_block * g.queries_per_plane, LANES), g.dtype),
        *[pltpu.VMEM((blocks.tile_tokens, blocks.tile_rows), jnp.float32)] * 2,
        *[pltpu.VMEM((1, blocks.tile_rows), jnp.float32)] * 2,
        *[pltpu.VMEM((planes, LANES + SUM_ROWS, blocks.tile_tokens), g.dtype)] * 2,
        pltpu.VMEM((blocks.num_masks(g), blocks.tile_tokens, blocks.mask_rows(g)), jnp.float32),
        pltpu.VMEM((g.num_k_planes + 1, tiles, 1, blocks.tile_rows), jnp.float32),
        pltpu.VMEM((g.num_k_planes + 1, tiles, LANES + SUM_ROWS, blocks.tile_rows), jnp.float32),
    ]


def _of_spec_decode(g: Geometry, blocks: FewBlocks) -> list[Any]:
    token_rows = FIRST_TOKEN_ROW + blocks.q_block + max(blocks.slots, paging.SUBLANES)
    per_group, rows = blocks.planes_per_group(g), blocks.group_rows(g)
    groups = blocks.max_chunks, g.num_k_planes // per_group
    return [
        pltpu.VMEM((g.num_k_planes * g.queries_per_plane, token_rows, LANES), jnp.float32),
        pltpu.VMEM((*groups, rows, per_group * LANES), g.dtype),
        *[pltpu.VMEM((*groups, rows, LANES), jnp.float32)] * 3,
    ]


def vmem_bytes(g: Geometry, blocks: MixedBlocks | FewBlocks) -> int:
    """The mixed kernel's limit of VMEM."""
    return vmem.bytes_with(vmem_scratch(g, blocks))


def other_scratch(blocks: MixedBlocks | FewBlocks) -> list[Any]:
    """The buffers in scalar memory, and the semaphores."""
    return [
        pltpu.SMEM((2, 1, 1, paging.WINDOW), jnp.int32),
        pltpu.SMEM((2,), jnp.int32),
        *([] if isinstance(blocks, FewBlocks) else [pltpu.SMEM((1,), jnp.int32)]),
        *[pltpu.SemaphoreType.DMA((2,))] * 5,
        *[pltpu.SemaphoreType.DMA] * 3,
    ]
