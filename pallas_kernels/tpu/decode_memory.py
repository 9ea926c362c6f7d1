"""The decode kernel's operands and scratch: their names, contents and sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu import paging, vmem
from pallas_kernels.tpu.layout import LANES, Geometry

ROW_TILE = 16  # query rows of one bf16 register tile


class Operands(NamedTuple):
    """One layer's decodes. `D` is the largest number of decode rows."""

    rows: jax.Array  # [D, num_k_planes, queries_per_plane, 128]
    new_words: jax.Array  # uint32[planes, D, 128]: each row's token, in its part of its word
    kv_pages: jax.Array  # uint32[P, planes, page_words, 128]
    kv_lens: jax.Array  # i32[S]
    new_pages: jax.Array  # i32[D]: the page of each row's new token
    page_table: jax.Array  # i32[S * windows_per_seq, 1, 128]
    scalars: jax.Array  # i32[2]: num_singles, first_page


@dataclass(frozen=True)
class Refs:
    """The kernel's arguments, in this order."""

    # Scalars, in SMEM
    kv_lens: Any  # i32[S]
    new_pages: Any  # i32[D]
    scalars: Any  # i32[2]
    # Inputs, in HBM
    page_table: Any  # i32[S * windows_per_seq, 1, 128]
    queries: Any  # [D, rows, 128], aliased to `out`
    new_hbm: Any  # uint32[planes, D, 128]
    pages_in: Any  # aliased to `pages`
    # Outputs, in HBM
    out: Any  # [D, rows, 128]
    pages: Any  # uint32[P, planes, page_words, 128]
    # Scratch, in VMEM up to `state`
    rows: Any  # [D + 1, rows, 128]: queries, overwritten by outputs; the last row is for items of no row
    new_words: Any  # uint32[planes, D, 128]
    kv_blocks: Any  # uint32[2, items, planes, block_words, 128]
    state: Any  # f32[groups, 3, group_rows, 128]: the running maximum, sum and weighted values
    table_windows: Any  # i32[2, items, 1, 128] in SMEM
    window_sems: Any
    kv_sems: Any
    load_sem: Any
    append_sem: Any
    store_sem: Any


@dataclass(frozen=True, kw_only=True)
class DecodeBlocks:
    """The sizes of one turn of the decode kernel."""

    kv_block: int  # tokens of one item
    items_per_turn: int


@dataclass(frozen=True, kw_only=True)
class Groups:
    """A group of planes: `planes` planes share a tile of `rows` query rows."""

    count: int
    planes: int
    rows: int


def group_planes(g: Geometry) -> Groups:
    """The largest groups of planes whose query rows fit one register tile; groups of one plane if none fit."""
    fitting = [
        n for n in range(1, g.num_k_planes + 1) if g.num_k_planes % n == 0 and n * g.queries_per_plane <= ROW_TILE
    ]
    planes = max(fitting, default=1)
    rows = -(-planes * g.queries_per_plane // ROW_TILE) * ROW_TILE
    return Groups(count=g.num_k_planes // planes, planes=planes, rows=rows)


def vmem_scratch(g: Geometry, blocks: DecodeBlocks, max_rows: int) -> list[Any]:
    """The buffers from `Refs.rows` to `Refs.state`, for `max_rows` decodes."""
    groups = group_planes(g)
    return [
        pltpu.VMEM((max_rows + 1, groups.count * groups.rows, LANES), g.dtype),
        pltpu.VMEM((g.num_planes, max_rows, LANES), jnp.uint32),
        pltpu.VMEM((2, blocks.items_per_turn, g.num_planes, blocks.kv_block // g.kv_packing, LANES), jnp.uint32),
        pltpu.VMEM((groups.count, 3, groups.rows, LANES), jnp.float32),
    ]


def vmem_bytes(g: Geometry, blocks: DecodeBlocks, max_rows: int) -> int:
    """The decode kernel's limit of VMEM."""
    return vmem.bytes_with(vmem_scratch(g, blocks, max_rows))


def other_scratch(blocks: DecodeBlocks) -> list[Any]:
    """The buffer in scalar memory, and the semaphores."""
    return [
        pltpu.SMEM((2, blocks.items_per_turn, 1, paging.WINDOW), jnp.int32),
        *[pltpu.SemaphoreType.DMA((2,))] * 2,
        *[pltpu.SemaphoreType.DMA] * 3,
    ]
