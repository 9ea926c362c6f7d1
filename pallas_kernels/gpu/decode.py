"""Decode: one query token per sequence against its pages, split over the context (flash-decoding) by a work list.

Persistent CTAs take work items. An item is a run of KV blocks of one sequence, for one KV head. The tensor-core tile is
16 query rows by `block_kv` keys; the four warps divide its columns. The rows are the group of query heads that share
the KV head, and neighbours whose results are dropped. Keys and values are copied page by page into a ring of SMEM
tiles: by TMA on Hopper and later, by cp.async on earlier GPUs. The first block of an item is copied while the CTA
computes the last block of the item before. If a sequence has only one item, the item writes the output. Otherwise its
items write float32 partial results, which `combine` merges.

Source of the algorithm: Dao et al., Flash-Decoding for long-context inference (2023); online softmax in base 2.

Interpret mode has no cp.async: in tests, copies by TMA replace it, with the waits of the cp.async code. Interpret mode
does not check mma (a plain product replaces it), fragment layouts, swizzles and the alignment that TMA needs. It finds
no races between CTAs, because it runs them one after another. Neither it nor the chip detects a page id out of range.
It does find missing waits and slots that are refilled too early. A wait without an arrival hangs it.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import conversion, matmul, online_softmax, persistent, vector
from pallas_kernels.gpu.parts import Parts
from pallas_kernels.gpu.ring import BlockShape, Following, Ring, Source
from pallas_kernels.gpu.work_list import ITEM_FIRST_BLOCK, ITEM_KV_LEN, ITEM_NUM_BLOCKS, ITEM_PART, ITEM_ROW

TILE_M = 16  # rows of one tensor-core tile
LOG2E = math.log2(math.e)


@dataclass(frozen=True, kw_only=True)
class RingTiles:
    """The sizes of the tiles of a `Ring`."""

    block_kv: int  # keys per step of the loop
    num_stages: int  # SMEM tiles for K, and for V, in the ring
    use_tma: bool


@dataclass(frozen=True)
class GroupRows:
    """The place of one KV head's query heads in the 16 rows that a CTA loads.

    The rows are read from [tokens * heads, H] in place, without packing: 16 rows that begin with the first of the
    group, or the last 16 rows if the array ends earlier.
    """

    num_rows: int  # rows of the flat array, at least 16
    num_query_heads: int
    group: int

    def first(self, token: jax.Array, kv_head: jax.Array) -> jax.Array:
        """The index of the group's first row in the array."""
        return token * self.num_query_heads + kv_head * self.group

    def loaded(self, first: jax.Array) -> jax.Array:
        """The index of the first of the 16 rows that are loaded for the group whose first row is `first`."""
        return jnp.minimum(first, self.num_rows - TILE_M)


class Operands(NamedTuple):
    """The inputs of one layer's decodes. `R` = T * N is the number of rows of the flat queries."""

    queries: jax.Array  # [R, H], at least 16 rows
    kv_pages: jax.Array  # [P, 2, K, page, H]
    page_table: jax.Array  # i32[S, pages_per_seq]
    first_page: jax.Array  # i32[1]
    items: jax.Array  # i32[W, ITEM_FIELDS], see work_list.py
    num_items: jax.Array  # i32[1]


@dataclass(frozen=True)
class Refs:
    """The kernel's arguments: the operands and outputs in this order, and the scratch by name."""

    queries: Any
    kv_pages: Any
    page_table: Any
    first_page: Any
    items: Any
    num_items: Any
    out: Any  # [R, H]
    partial: Any = None  # f32[slots, N * H]; None: no sequence is cut into parts
    sums: Any = None  # f32[K, 16, slots + parts of a row]
    _: KW_ONLY
    k_smem: Any  # [stages, block_kv, H]
    v_smem: Any
    p_or_out_smem: Any  # the weights [16, block_kv], and later the result f32[16, H] in the same memory
    arrived: Any = None  # barriers of the ring; None: copies are by cp.async
    k_converted: Any = None  # [block_kv, H], the keys of an 8-bit tile after conversion
    v_converted: Any = None


class Item(NamedTuple):
    """One item of the work list for one KV head, as scalars."""

    row: jax.Array
    kv_head: jax.Array
    first_block: jax.Array
    num_blocks: jax.Array
    kv_len: jax.Array
    part: jax.Array

    @classmethod
    def read(cls, items_ref: Any, unit: jax.Array, num_kv_heads: int) -> Self:
        """Reads unit `unit` of the launch. A unit is an item of the list and a KV head; the KV heads of one item are
        neighbouring units."""
        index, kv_head = lax.div(unit, jnp.int32(num_kv_heads)), lax.rem(unit, jnp.int32(num_kv_heads))
        fields = (ITEM_ROW, ITEM_FIRST_BLOCK, ITEM_NUM_BLOCKS, ITEM_KV_LEN, ITEM_PART)
        row, *others = (items_ref[index, field] for field in fields)
        return cls(row, kv_head, *others)


def decode(
    operands: Operands,
    *,
    num_query_heads: int,
    scale: float,
    tiles: RingTiles,
    num_ctas: int,
    parts: Parts,
    interpret: Any = None,
) -> tuple[jax.Array, ...]:
    """Attends the decode rows. Returns the output [R, H], in which only the rows of sequences with one item are
    written.

    If rows may be cut, it also returns partial results f32[slots, N * H] and the log2 of the divisors of their softmax,
    f32[K, 16, slots + parts of a row]. They have the order in which `combine` reads them as vectors.
    """
    num_rows, head_dim = operands.queries.shape
    _, _, num_kv_heads, page_size, _ = operands.kv_pages.shape
    rows = GroupRows(num_rows, num_query_heads, num_query_heads // num_kv_heads)
    dtype, kv_dtype = operands.queries.dtype, operands.kv_pages.dtype
    pages_per_seq = operands.page_table.shape[1]
    blocks = BlockShape(block_kv=tiles.block_kv, page_size=page_size, pages_per_seq=pages_per_seq)
    body = _Body(
        rows=rows, num_kv_heads=num_kv_heads, head_dim=head_dim, blocks=blocks, dtype=dtype, scale_log2=scale * LOG2E,
        tiles=tiles, num_ctas=num_ctas, interpret=interpret,
    )  # fmt: skip
    kv_tiles = plgpu.SMEM(
        (tiles.num_stages, tiles.block_kv, head_dim),
        kv_dtype,
        transforms=matmul.swizzled(head_dim, kv_dtype, copied_rows=None if tiles.use_tma else blocks.copy_tokens),
    )
    scratch: dict[str, Any] = {
        "k_smem": kv_tiles,
        "v_smem": kv_tiles,
        "p_or_out_smem": plgpu.RefUnion(
            plgpu.SMEM((TILE_M, tiles.block_kv), dtype, transforms=matmul.swizzled(tiles.block_kv, dtype)),
            plgpu.SMEM((TILE_M, head_dim), jnp.float32),
        ),
    }
    if tiles.use_tma:
        scratch["arrived"] = plgpu.Barrier(num_arrivals=2 * blocks.copies, num_barriers=tiles.num_stages)
    if kv_dtype != dtype:
        scratch["k_converted"] = scratch["v_converted"] = conversion.converted_tile((tiles.block_kv, head_dim), dtype)
    results = [jax.ShapeDtypeStruct((num_rows, head_dim), dtype)]
    if parts.num_slots:
        sums_shape = (num_kv_heads, TILE_M, parts.num_slots + parts.vector)
        results.append(jax.ShapeDtypeStruct((parts.num_slots, num_query_heads * head_dim), jnp.float32))
        results.append(jax.ShapeDtypeStruct(sums_shape, jnp.float32))
    return plgpu.kernel(
        body,
        out_type=tuple(results),
        scratch_types=scratch,
        grid=(num_ctas,),
        grid_names=("cta",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="paged_decode",
    )(*operands)


@dataclass(frozen=True, kw_only=True)
class _Body:
    rows: GroupRows
    num_kv_heads: int
    head_dim: int
    blocks: BlockShape
    dtype: Any
    scale_log2: float
    tiles: RingTiles
    num_ctas: int
    interpret: Any

    def __call__(self, *arrays: Any, **scratch: Any) -> None:
        refs = Refs(*arrays, **scratch)
        units = refs.num_items[0] * self.num_kv_heads
        cta = lax.axis_index("cta")
        pl.when(cta < units)(lambda: self.attend_items(refs, cta, units))

    def attend_items(self, refs: Refs, cta: jax.Array, units: jax.Array) -> None:
        """Computes all items of a CTA that has at least one."""

        def item_of(unit: jax.Array) -> Item:  # past the last unit, it gives the last item
            return Item.read(refs.items, jnp.minimum(unit, units - 1), self.num_kv_heads)

        first = item_of(cta)
        self.ring(refs, first).fill()

        def one(round_: jax.Array, carry: Any) -> Any:
            item, blocks_before = carry
            unit, next_unit = (persistent.unit_of(round_ + i, cta, self.num_ctas) for i in range(2))
            next_item = item_of(next_unit)
            following = Following(
                row=next_item.row, kv_head=next_item.kv_head, block=next_item.first_block, exists=next_unit < units
            )
            ring = self.ring(refs, item, blocks_before=blocks_before, following=following)
            pl.when(unit < units)(lambda: self.attend_item(refs, item, ring))
            return next_item, blocks_before + item.num_blocks

        num_rounds = persistent.rounds(units, self.num_ctas)
        lax.fori_loop(0, num_rounds, one, (first, jnp.int32(0)))
        self.ring(refs, first).drain()

    def ring(self, refs: Refs, item: Item, **runs: Any) -> Ring:
        """The ring for an item's blocks. `runs`: the number of blocks before it, and the item after it."""
        source = Source(
            shape=self.blocks, kv_ref=refs.kv_pages, pages_ref=refs.page_table, first_page=refs.first_page[0],
            row=item.row, kv_head=item.kv_head,
        )  # fmt: skip
        return Ring(
            source=source, first_block=item.first_block, num_blocks=item.num_blocks, num_stages=self.tiles.num_stages,
            k_smem=refs.k_smem, v_smem=refs.v_smem, arrived=refs.arrived,
            k_converted=refs.k_converted, v_converted=refs.v_converted,
            **runs,
        )  # fmt: skip

    def attend_item(self, refs: Refs, item: Item, ring: Ring) -> None:
        p_smem, out_smem = refs.p_or_out_smem
        first_row = self.rows.first(item.row, item.kv_head)
        loaded_row = self.rows.loaded(first_row)
        acc, sums = self.attend(refs.queries, loaded_row, ring, p_smem, item.kv_len)
        out_smem[...] = acc
        offset = first_row - loaded_row  # where the group begins in the tile

        def result(g: int) -> jax.Array:
            return vector.load(out_smem.at[offset + g], self.head_dim)

        def store_output() -> None:
            for g in range(self.rows.group):
                refs.out[first_row + g] = result(g).astype(self.dtype)

        if refs.partial is None:
            store_output()
            return
        pl.when(item.part < 0)(store_output)

        @pl.when(item.part >= 0)
        def _() -> None:
            refs.sums[item.kv_head, :, item.part] = sums
            for g in range(self.rows.group):
                columns = vector.head_columns(item.kv_head * self.rows.group + g, self.head_dim)
                refs.partial[item.part, columns] = result(g)

    def attend(self, q_ref: Any, loaded_row: jax.Array, ring: Any, p_smem: Any, kv_len: jax.Array) -> Any:
        """The item's attention output f32[16, H], normalised, and the log2 of its softmax's denominator."""
        layout = plgpu.Layout
        acc_layout = layout.MMA_ACC(self.dtype, m_warps=1)
        lhs, rhs = layout.MMA_LHS(self.dtype, m_warps=1), layout.MMA_RHS(self.dtype, m_warps=1)
        block_kv = self.tiles.block_kv
        shape = (TILE_M, block_kv)
        q = plgpu.load(q_ref.at[pl.ds(loaded_row, TILE_M)], layout=lhs, optimized=False)

        def step(i: jax.Array, carry: Any, *, tail: bool) -> Any:
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
                v = jnp.where(matmul.rows_before(valid, v.shape, rhs), v, jnp.zeros_like(v))
            acc = online_softmax.scaled(acc, alpha)
            return matmul.mma(acc, p, v, interpret=self.interpret), new_peak, total

        carry = online_softmax.start(TILE_M, self.head_dim, acc_layout)
        whole = lax.div(kv_len, jnp.int32(block_kv)) - ring.first_block  # blocks without a tail
        whole = jnp.clip(whole, 0, ring.num_blocks)
        carry = lax.fori_loop(0, whole, lambda i, c: step(i, c, tail=False), carry)
        acc, peak, total = lax.fori_loop(whole, ring.num_blocks, lambda i, c: step(i, c, tail=True), carry)
        return online_softmax.finish(acc, peak, total)
