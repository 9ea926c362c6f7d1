"""Decode: one query token per sequence against its pages, split over the context (flash-decoding) by a work list.

One CTA takes one work item: a run of KV blocks of one sequence, for one KV head. Its tensor-core tile is 16 query rows
(the group of query heads that share the KV head, and neighbours whose results are dropped) by `block_kv` keys, divided
over the four warps by columns. Keys and values come page by page into a ring of SMEM tiles: by TMA from Hopper on, by
cp.async below. An item that is its sequence's only one writes the output; the others write float32 partial results,
which `combine` merges.

Source of the algorithm: Dao et al., Flash-Decoding for long-context inference (2023); online softmax in base 2.

Interpret mode does not check cp.async (that form is only compiled; the tests run the TMA form), mma (a plain product
replaces it), fragment layouts, swizzles and the alignment that TMA needs. It finds no races between CTAs, because it
runs them one after another. Neither it nor the chip detects a page id out of range. It does find missing waits and
slots that are refilled too early; a wait without an arrival hangs it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import matmul, online_softmax, vector, widening
from pallas_kernels.gpu.ring import BlockShape, Ring, Source
from pallas_kernels.gpu.work_list import (
    ITEM_FIRST_BLOCK,
    ITEM_IS_SPLIT,
    ITEM_KV_LEN,
    ITEM_NUM_BLOCKS,
    ITEM_ROW,
    MAX_SPLITS,
)

TILE_M = 16  # rows of one tensor-core tile
LOG2E = math.log2(math.e)


@dataclass(frozen=True, kw_only=True)
class RingTiles:
    """The tiles of a `Ring`."""

    block_kv: int  # keys per step of the loop
    num_stages: int  # SMEM tiles in the ring, of K and of V
    use_tma: bool


@dataclass(frozen=True)
class GroupRows:
    """The place of one KV head's query heads in the 16 rows that a CTA loads.

    The rows are read from [tokens * heads, H] in place, without packing: 16 rows from the group's first on, or the last
    16 where the array ends before that.
    """

    num_rows: int  # of the flat array, at least 16
    num_query_heads: int
    group: int

    def first(self, token: jax.Array, kv_head: jax.Array) -> jax.Array:
        """The group's first row in the array."""
        return token * self.num_query_heads + kv_head * self.group

    def loaded(self, first: jax.Array) -> jax.Array:
        """The first of the 16 rows that are loaded for the group whose first row is `first`."""
        return jnp.minimum(first, self.num_rows - TILE_M)


class Operands(NamedTuple):
    """One layer's decodes. Rows `R` are those of the flat queries: T * N."""

    queries: jax.Array  # [R, H], at least 16 rows
    kv_pages: jax.Array  # [P, 2, K, page, H]
    page_table: jax.Array  # i32[S, pages_per_seq]
    first_page: jax.Array  # i32[1]
    items: jax.Array  # i32[W, ITEM_FIELDS], see work_list.py


@dataclass(frozen=True)
class Refs:
    """The kernel's arguments: the operands and outputs in this order, the scratch by name."""

    queries: Any
    kv_pages: Any
    page_table: Any
    first_page: Any
    items: Any
    out: Any  # [R, H]
    partial: Any  # f32[W, K, G, H]
    lse: Any  # f32[K, 16, W + 128]
    k_or_out_smem: Any  # the keys' tiles [stages, block_kv, H], and in their place the result f32[16, H]
    v_smem: Any  # [stages, block_kv, H]
    p_smem: Any  # [16, block_kv]
    arrived: Any = None  # barriers of the ring; None: cp.async
    k_wide: Any = None  # [block_kv, H], of 8-bit tiles
    v_wide: Any = None


def decode(
    operands: Operands, *, num_query_heads: int, scale: float, tiles: RingTiles, interpret: Any = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns output [R, H] (only rows of unsplit sequences are written), partial results f32[W, K, G, H]
    and their log2-sum-exp f32[K, 16, W + 128] (the layout that `combine` reads in vectors)."""
    num_rows, head_dim = operands.queries.shape
    _, _, num_kv_heads, page_size, _ = operands.kv_pages.shape
    num_items = operands.items.shape[0]
    rows = GroupRows(num_rows, num_query_heads, num_query_heads // num_kv_heads)
    dtype = operands.queries.dtype
    pages_per_seq = operands.page_table.shape[1]
    blocks = BlockShape(block_kv=tiles.block_kv, page_size=page_size, pages_per_seq=pages_per_seq)
    body = _Body(
        rows=rows, head_dim=head_dim, blocks=blocks, dtype=dtype, scale_log2=scale * LOG2E, tiles=tiles,
        interpret=interpret,
    )  # fmt: skip
    kv_dtype = operands.kv_pages.dtype
    kv_tiles = plgpu.SMEM(
        (tiles.num_stages, tiles.block_kv, head_dim),
        kv_dtype,
        transforms=matmul.swizzled(head_dim, kv_dtype, copied_rows=None if tiles.use_tma else blocks.copy_tokens),
    )
    scratch: dict[str, Any] = {
        # The result reuses the memory of the keys after their last use.
        "k_or_out_smem": plgpu.RefUnion(kv_tiles, plgpu.SMEM((TILE_M, head_dim), jnp.float32)),
        "v_smem": kv_tiles,
        "p_smem": plgpu.SMEM((TILE_M, tiles.block_kv), dtype, transforms=matmul.swizzled(tiles.block_kv, dtype)),
    }
    if tiles.use_tma:
        scratch["arrived"] = plgpu.Barrier(num_arrivals=2 * blocks.copies, num_barriers=tiles.num_stages)
    if kv_dtype != dtype:
        scratch["k_wide"] = scratch["v_wide"] = widening.wide_tile((tiles.block_kv, head_dim), dtype)
    return plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((num_rows, head_dim), dtype),
            jax.ShapeDtypeStruct((num_items, num_kv_heads, rows.group, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((num_kv_heads, TILE_M, num_items + MAX_SPLITS), jnp.float32),
        ],
        scratch_types=scratch,
        grid=(num_items, num_kv_heads),
        grid_names=("item", "kv_head"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="paged_decode",
    )(*operands)


@dataclass(frozen=True, kw_only=True)
class _Body:
    rows: GroupRows
    head_dim: int
    blocks: BlockShape
    dtype: Any
    scale_log2: float
    tiles: RingTiles
    interpret: Any

    def __call__(self, *arrays: Any, **scratch: Any) -> None:
        refs = Refs(*arrays, **scratch)
        item, kv_head = lax.axis_index("item"), lax.axis_index("kv_head")
        row = refs.items[item, ITEM_ROW]
        pl.when(row >= 0)(lambda: self.attend_item(refs, item, row, kv_head))

    def attend_item(self, refs: Refs, item: Any, row: Any, kv_head: Any) -> None:
        first_block, num_blocks = refs.items[item, ITEM_FIRST_BLOCK], refs.items[item, ITEM_NUM_BLOCKS]
        kv_len, is_split = refs.items[item, ITEM_KV_LEN], refs.items[item, ITEM_IS_SPLIT]
        k_smem, out_smem = refs.k_or_out_smem
        source = Source(
            shape=self.blocks, kv_ref=refs.kv_pages, pages_ref=refs.page_table, first_page=refs.first_page[0],
            row=row, kv_head=kv_head,
        )  # fmt: skip
        ring = Ring(
            source=source, first_block=first_block, num_blocks=num_blocks, num_stages=self.tiles.num_stages,
            k_smem=k_smem, v_smem=refs.v_smem, arrived=refs.arrived, k_wide=refs.k_wide, v_wide=refs.v_wide,
        )  # fmt: skip
        first_row = self.rows.first(row, kv_head)
        loaded_row = self.rows.loaded(first_row)
        acc, lse = self.attend(refs.queries, loaded_row, ring, refs.p_smem, kv_len)
        out_smem[...] = acc
        offset = first_row - loaded_row  # of the group in the tile
        refs.lse[kv_head, :, item] = lse

        @pl.when(is_split == 0)
        def _():
            for g in range(self.rows.group):
                row = vector.load(out_smem.at[offset + g], self.head_dim)
                refs.out[first_row + g] = row.astype(self.dtype)

        @pl.when(is_split != 0)
        def _():
            for g in range(self.rows.group):
                row = vector.load(out_smem.at[offset + g], self.head_dim)
                refs.partial[item, kv_head, g] = row

    def attend(self, q_ref, loaded_row, ring, p_smem, kv_len):
        """The item's attention output f32[16, H], normalised, and the log2 of its softmax's denominator."""
        layout = plgpu.Layout
        acc_layout = layout.MMA_ACC(self.dtype, m_warps=1)
        lhs, rhs = layout.MMA_LHS(self.dtype, m_warps=1), layout.MMA_RHS(self.dtype, m_warps=1)
        block_kv = self.tiles.block_kv
        shape = (TILE_M, block_kv)
        q = plgpu.load(q_ref.at[pl.ds(loaded_row, TILE_M)], layout=lhs, optimized=False)
        ring.fill()

        def step(i, carry, *, tail):
            acc, peak, total = carry
            k_tile, v_tile = ring.tiles(ring.advance(i))
            k = plgpu.load(k_tile.transpose((1, 0)), layout=rhs, optimized=False)
            zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), acc_layout)
            scores = matmul.mma(zeros, q, k, interpret=self.interpret)
            valid = kv_len - (ring.first_block + i) * block_kv  # keys of this block that exist
            if tail:
                column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=acc_layout)
                scores = jnp.where(column < valid, scores, -jnp.inf)
            p, alpha, new_peak, total = online_softmax.step(scores, peak, total, self.scale_log2)
            p_smem[...] = p.astype(self.dtype)
            p = plgpu.load(p_smem, layout=lhs, optimized=False)
            v = plgpu.load(v_tile, layout=rhs, optimized=False)
            if tail:
                # The places after the last key may hold any values, and 0 * NaN is NaN.
                key = plgpu.broadcasted_iota(jnp.int32, (block_kv, self.head_dim), 0, layout=rhs)
                v = jnp.where(key < valid, v, jnp.zeros_like(v))
            acc = online_softmax.scaled(acc, alpha)
            return matmul.mma(acc, p, v, interpret=self.interpret), new_peak, total

        carry = online_softmax.start(TILE_M, self.head_dim, acc_layout, lowest=-jnp.inf)
        whole = lax.div(kv_len, jnp.int32(block_kv)) - ring.first_block  # blocks without a tail
        whole = jnp.clip(whole, 0, ring.num_blocks)
        carry = lax.fori_loop(0, whole, lambda i, c: step(i, c, tail=False), carry)
        acc, peak, total = lax.fori_loop(whole, ring.num_blocks, lambda i, c: step(i, c, tail=True), carry)
        ring.drain()
        output, total = online_softmax.finish(acc, total)
        return output, peak + jnp.log2(total)
