"""The decode kernel's operands and scratch: their names, contents and sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu import paging, vmem
from pallas_kernels.tpu.layout import LANES, Geometry

SHORT_BLOCK = 256  # tokens of an item if no row has more, in place of `DecodeBlocks.kv_block`
ROW_TILE = 16  # query rows of one bf16 register tile


class Operands(NamedTuple):
    """One layer's decodes. `D` is the largest number of decode rows, in whole tiles of tokens."""

    queries: jax.Array  # [T, columns], of which the first `query_columns` are queries
    new_kv: jax.Array  # [T, columns], with K and V from `kv_column` on; the array of the queries, or another
    rotation: jax.Array | None  # f32[T, 256], see `lanes`; None if queries and keys are rotated
    kv_scales: jax.Array | None  # f32[2K], of the keys' heads and of the values'; None if pages have the queries' dtype
    kv_pages: jax.Array  # uint32[P, planes, page_words, 128]
    kv_lens: jax.Array  # i32[S]
    new_pages: jax.Array  # i32[rows]: the page of each row's new token
    page_table: jax.Array  # i32[S * windows_per_seq, 1, 128]
    scalars: jax.Array  # i32[3]: num_singles, first_page, tokens of the longest row


@dataclass(frozen=True, kw_only=True)
class Refs:
    """The kernel's arguments."""

    # Scalars, in SMEM
    kv_lens: Any  # i32[S]
    new_pages: Any  # i32[rows]
    scalars: Any  # i32[3]
    kv_scales: Any | None  # f32[2K]
    # Inputs, in HBM
    page_table: Any  # i32[S * windows_per_seq, 1, 128]
    queries: Any  # [T, columns]
    new_kv: Any  # [T, columns]
    kv_column: int
    rotation: Any | None  # f32[T, 256]
    # Outputs, in HBM
    out: Any  # [T, query_columns]
    pages: Any  # uint32[P, planes, page_words, 128], aliased to the input
    # Scratch, in VMEM up to `state`
    tokens: Any  # [D, query_columns]: queries, overwritten by outputs
    new_tokens: Any  # [D, kv_columns]
    rotations: Any  # f32[D, 256]
    token_words: Any  # uint32[(blocks + rows of a group) * words of a tile, 128]: a tile of `tokens`, block by block
    rows: Any  # [D + 1, rows, 128]: queries, overwritten by outputs; the last row is for items of no row
    token_pairs: Any  # uint32[planes, D / kv_packing, 128]: the new tokens, neighbouring ones in one word
    new_words: Any  # uint32[planes, D, 128]: each row's word that holds its new token
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
    """A group of planes: `planes` planes share a tile of `rows` query rows.

    With two heads in a lane block, those of the first halves are in the upper half of the tile's rows, and those of the
    second halves in the lower half. Rows of no head come after the others of their half.
    """

    count: int
    planes: int
    rows: int
    halves: int  # parts of the tile: 1, or 2 if a lane block has two heads
    plane_rows: int  # of one plane in one part: the plane's lane blocks

    @property
    def part_rows(self) -> int:
        """Rows of one part."""
        return self.rows // self.halves

    @property
    def blocks(self) -> int:
        """Lane blocks of the group: the rows of a part that have heads."""
        return self.planes * self.plane_rows


def group_planes(g: Geometry) -> Groups:
    """The largest groups of planes whose query rows fit one register tile; groups of one plane if none fit."""
    fitting = [
        n for n in range(1, g.num_k_planes + 1) if g.num_k_planes % n == 0 and n * g.queries_per_plane <= ROW_TILE
    ]
    planes = max(fitting, default=1)
    rows = -(-planes * g.queries_per_plane // ROW_TILE) * ROW_TILE
    return Groups(
        count=g.num_k_planes // planes,
        planes=planes,
        rows=rows,
        halves=g.queries_per_plane // g.plane_blocks,
        plane_rows=g.plane_blocks,
    )


def max_rows(g: Geometry, num_decodes: int) -> int:
    """The rows of the buffers for at most `num_decodes` decodes: whole tiles of tokens that are packed."""
    return -(-num_decodes // g.pack_tile) * g.pack_tile


def vmem_scratch(g: Geometry, blocks: DecodeBlocks, max_rows: int) -> list[Any]:
    """The buffers from `Refs.tokens` to `Refs.state`, for `max_rows` decodes in whole tiles of tokens."""
    groups = group_planes(g)
    tile_words = g.token_tile // g.query_packing
    return [
        pltpu.VMEM((max_rows, g.query_columns), g.dtype),
        pltpu.VMEM((max_rows, g.kv_columns), g.dtype),
        pltpu.VMEM((max_rows, 2 * LANES), jnp.float32),
        pltpu.VMEM(((g.query_columns // LANES + groups.rows) * tile_words, LANES), jnp.uint32),
        pltpu.VMEM((max_rows + 1, groups.count * groups.rows, LANES), g.dtype),
        pltpu.VMEM((g.num_planes, max_rows // g.kv_packing, LANES), jnp.uint32),
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
