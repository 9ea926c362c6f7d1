"""The mixed kernel's operands and scratch: what they are called, what they hold, and how large they are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu import paging
from pallas_kernels.tpu.layout import LANES, Geometry
from pallas_kernels.tpu.tiles import MixedBlocks

COMPILER_BYTES = 16 << 20  # of VMEM
SUM_ROWS = 16  # rows of ones below V^T: one bf16 register tile; the first is read


@dataclass(frozen=True, kw_only=True)
class Refs:
    """In VMEM from `q_blocks` to `edge`; two of a buffer that copies fill or empty while the other is worked on."""

    kv_lens: Any  # i32[S] in SMEM
    query_starts: Any  # i32[S + 1] in SMEM
    new_pages: Any  # i32[page slots] in SMEM
    queries: Any  # uint32[num_k_planes, T * row_words, 128] in HBM, aliased to out
    new_words: Any  # uint32[planes, W, 128] in HBM: each row's new words, see `append`
    out: Any
    pages: paging.Pages
    q_blocks: Any  # uint32[2, num_k_planes, q_block * row_words, 128]
    q_scaled: Any  # [num_k_planes, q_block * queries_per_plane, 128]
    kv_blocks: Any  # uint32[2, planes, block_words, 128]
    scores_even: Any  # f32[tile_tokens, tile_rows]
    scores_odd: Any
    unit_tops_even: Any  # f32[1, tile_rows]: the scores' maximum over tokens
    unit_tops_odd: Any
    v_t_even: Any  # [128 + SUM_ROWS, tile_tokens]
    v_t_odd: Any
    masks: Any  # f32[num_masks, tile_tokens, tile_rows]: MASKED or -MASKED
    tops: Any  # f32[num_k_planes + 1, tiles, 1, tile_rows]: the running maximum
    values: Any  # f32[num_k_planes + 1, tiles, 128 + SUM_ROWS, tile_rows]: the running sums, relative to it
    out_blocks: Any  # uint32[2, num_k_planes, q_block * row_words, 128]
    edge: Any  # uint32[2, planes, 1, 128]
    windows: Any  # i32[2, 1, 1, 128] in SMEM
    out_words: Any  # i32[2] in SMEM: words on their way out of each half of out_blocks
    mask_phase: Any  # i32[1] in SMEM: what `masks` were made for
    window_sems: Any
    kv_sems: Any
    q_sems: Any
    out_sems: Any
    append_sem: Any


_names = list(Refs.__dataclass_fields__)
SCRATCH = _names[_names.index("q_blocks") :]  # in the order of `vmem_scratch` and `other_scratch`


def vmem_scratch(g: Geometry, blocks: MixedBlocks) -> list[Any]:
    row_words = g.queries_per_plane // g.packing
    block_words = blocks.kv_block // g.packing
    tiles = blocks.max_q_tiles(g)
    return [
        pltpu.VMEM((2, g.num_k_planes, blocks.q_block * row_words, LANES), jnp.uint32),
        pltpu.VMEM((g.num_k_planes, blocks.q_block * g.queries_per_plane, LANES), g.dtype),
        pltpu.VMEM((2, g.num_planes, block_words, LANES), jnp.uint32),
        *[pltpu.VMEM((blocks.tile_tokens, blocks.tile_rows), jnp.float32)] * 2,
        *[pltpu.VMEM((1, blocks.tile_rows), jnp.float32)] * 2,
        *[pltpu.VMEM((LANES + SUM_ROWS, blocks.tile_tokens), g.dtype)] * 2,
        pltpu.VMEM((blocks.num_masks(g), blocks.tile_tokens, blocks.tile_rows), jnp.float32),
        pltpu.VMEM((g.num_k_planes + 1, tiles, 1, blocks.tile_rows), jnp.float32),
        pltpu.VMEM((g.num_k_planes + 1, tiles, LANES + SUM_ROWS, blocks.tile_rows), jnp.float32),
        pltpu.VMEM((2, g.num_k_planes, blocks.q_block * row_words, LANES), jnp.uint32),
        pltpu.VMEM((2, g.num_planes, 1, LANES), jnp.uint32),
    ]


def vmem_bytes(g: Geometry, blocks: MixedBlocks) -> int:
    """What the mixed kernel may use: its scratch buffers, and what the compiler keeps next to them."""
    scratch = sum(math.prod(ref.shape) * jnp.dtype(ref.dtype).itemsize for ref in vmem_scratch(g, blocks))
    return scratch + COMPILER_BYTES


def other_scratch() -> list[Any]:
    """In scalar memory, and the semaphores."""
    return [
        pltpu.SMEM((2, 1, 1, paging.WINDOW), jnp.int32),
        pltpu.SMEM((2,), jnp.int32),
        pltpu.SMEM((1,), jnp.int32),
        *[pltpu.SemaphoreType.DMA((2,))] * 4,
        pltpu.SemaphoreType.DMA,
    ]
