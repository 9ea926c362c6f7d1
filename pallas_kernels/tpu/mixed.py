"""The mixed kernel: rows of any number of tokens, mostly prompt chunks.

First every row's new K/V are copied from HBM to their pages in HBM (`append`). Attention then reads pages only. Its
work is a list of entries: for each query block of each row, the KV blocks that it sees. A cursor (row, query block, KV
block) steps through them. The copies of the next entry, of any row, run while this entry is computed.

    entry i:  wait for the window of the page table that names entry i+1's pages, start the copies of entry i+1's KV
              block into the other half of `kv_blocks` and of entry i+2's window; if entry i+1 begins a query block,
              also those of its queries into the other half of `q_blocks`
              wait for entry i's KV block (and its queries, at a query block's beginning)
              for every unit: `prepare` makes its scores, masks them, and transposes V; `fold` takes their softmax and
              adds the weighted values
              at a query block's last KV block: divide, transpose back, store into `out_blocks`, start the copy to HBM

A unit is one plane, one tile of query rows and one tile of the block's tokens (see `tiles`). `prepare` runs one unit
ahead of `fold`, in the other of two sets of buffers, and both alternate in slices of `SLICE_ROWS` query rows. They do
not depend on each other, so the compiler can fill the matrix unit and the vector units at the same time. Weights go to
the matrix unit as soon as they are computed, before the registers run out.

All products are computed transposed, with tokens along the first axis and query rows along the second:

    scores^T  [tokens, rows]   = min(K Q^T, mask)
    weights^T [tokens, rows]   = exp2(scores^T - maximum over tokens)
    values^T  [128 + 16, rows] = [V | 1]^T weights^T

So the maximum over tokens is taken between registers, not within them. The weights have the layout of the matrix unit's
stationary operand. 128 rows of V^T stream past it, so head_dim 128 fills a 256 x 256 unit; V without the transpose
would leave half of it empty. With rows of ones below V^T, the sum of the weights is one more row of the values, without
any vector instruction.

`masks` holds the masks of a row's units; number 0 masks nothing. They are recomputed only if they differ from those of
the previous row.

`mixed_memory` lists the buffers; `entries` has the order of entries, with an example.

The semaphores: `kv_sems[half]`, `q_sems[half]` and `out_sems[half]` belong to the halves of their buffers, and
`window_sems[half]` to the window of the entry that will fill that half of `kv_blocks`. The kernel waits for the copies
out of a half of `out_blocks` before it stores into that half again, and at the end. `append_sem` counts the new words
written to pages; all of them have arrived before the first KV block is fetched.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu import append, paging
from pallas_kernels.tpu.entries import Cursor, Entry, entry_at
from pallas_kernels.tpu.layout import LANES, Geometry
from pallas_kernels.tpu.mixed_memory import SUM_ROWS, Operands, Refs, other_scratch, vmem_bytes, vmem_scratch
from pallas_kernels.tpu.tiles import MixedBlocks

SLICE_ROWS = 256  # query rows computed at a time: the columns of the largest matrix unit


@dataclass(frozen=True, kw_only=True)
class _Body:
    """The kernel, for rows [begin_row, end_row)."""

    refs: Refs
    g: Geometry
    blocks: MixedBlocks
    begin_row: Any
    end_row: Any
    pages: paging.Pages
    windows: paging.Windows

    @classmethod
    def of(cls, refs: Refs, g: Geometry, blocks: MixedBlocks) -> _Body:
        begin_row, end_row = refs.scalars[0], refs.scalars[1]
        return cls(
            refs=refs,
            g=g,
            blocks=blocks,
            begin_row=begin_row,
            end_row=end_row,
            pages=paging.Pages(hbm=refs.pages, first_page=refs.scalars[2], geometry=g),
            windows=paging.Windows(
                table=refs.page_table,
                smem=refs.table_windows,
                sems=refs.window_sems,
                per_seq=refs.page_table.shape[0] // refs.kv_lens.shape[0],
            ),
        )

    def run(self) -> None:
        refs = self.refs
        zero = jnp.int32(0)
        start = (self.begin_row, zero, zero)
        self.window(self.entry(start), 0).start()
        append.append_rows(self.begin_row, self.end_row, refs, self.pages)
        for v_t in (refs.v_t_even, refs.v_t_odd):
            v_t[LANES:] = jnp.ones((SUM_ROWS, self.blocks.tile_tokens), v_t.dtype)
        # Without this use outside the loop over units, the compiler would keep the buffer in registers and spill it.
        refs.scores_odd[:8, :LANES] = jnp.zeros((8, LANES), jnp.float32)
        refs.masks[0] = jnp.full(refs.masks.shape[1:], -paging.MASKED, jnp.float32)
        refs.mask_phase[0] = -1
        for half in range(2):
            refs.out_words[half] = 0
        self.start_fetching(start, 0, 0)
        lax.while_loop(lambda carry: carry[0] < self.end_row, self.step, (*start, zero, zero))
        for half in range(2):
            paging.wait_words(refs.out_blocks.at[half], refs.out_words[half], refs.out_sems.at[half])

    def step(self, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        """One entry."""
        row, q_index, kv_index, kv_half, q_half = carry
        refs, g, blocks = self.refs, self.g, self.blocks
        entry = self.entry((row, q_index, kv_index))
        next_q_half = jnp.where(entry.is_last, 1 - q_half, q_half)

        @pl.when(entry.next[0] < self.end_row)
        def _() -> None:
            self.start_fetching(entry.next, 1 - kv_half, next_q_half)

        @pl.when(kv_index == 0)
        def _() -> None:
            num_words = entry.num_q * (g.queries_per_plane // g.query_packing)
            paging.wait_words(refs.q_blocks.at[q_half], num_words, refs.q_sems.at[q_half])
            _begin_q_block(refs, entry, q_half, g, blocks)

        begin, end = entry.kv_words
        paging.wait_words(refs.kv_blocks.at[kv_half], end - begin, refs.kv_sems.at[kv_half])
        _attend(refs, entry, refs.kv_blocks.at[kv_half], end - begin, g, blocks)

        @pl.when(entry.is_last)
        def _() -> None:
            _store_q_block(refs, entry, q_half, g, blocks)

        return *entry.next, 1 - kv_half, next_q_half

    def entry(self, cursor: Cursor) -> Entry:
        return entry_at(cursor, self.refs.kv_lens, self.refs.query_starts, self.g, self.blocks)

    def window(self, entry: Entry, half: Any) -> Any:
        return self.windows.copy(entry.row, entry.first_kv_page, half, 0)

    def start_fetching(self, cursor: Cursor, kv_half: Any, q_half: Any) -> None:
        """Starts the copies of the entry at `cursor`, whose window is being copied, and of the next entry's window."""
        refs, g = self.refs, self.g
        entry = self.entry(cursor)
        self.window(entry, kv_half).wait()
        begin, end = entry.kv_words
        page_of = functools.partial(self.windows.page, kv_half, 0)
        paging.fetch(self.pages, page_of, begin, end, refs.kv_blocks.at[kv_half], refs.kv_sems.at[kv_half])

        @pl.when(entry.next[0] < self.end_row)
        def _() -> None:
            self.window(self.entry(entry.next), 1 - kv_half).start()

        @pl.when(entry.kv_index == 0)
        def _() -> None:
            row_words = g.queries_per_plane // g.query_packing
            num_words = entry.num_q * row_words
            source = refs.queries.at[:, pl.ds(entry.q_start * row_words, num_words)]
            target = refs.q_blocks.at[q_half, :, pl.ds(0, num_words)]
            pltpu.make_async_copy(source, target, refs.q_sems.at[q_half]).start()


def _kernel(*refs: Any, g: Geometry, blocks: MixedBlocks) -> None:
    body = _Body.of(Refs(*refs), g, blocks)
    pl.when(body.begin_row < body.end_row)(body.run)


def _begin_q_block(refs: Refs, entry: Entry, q_half: Any, g: Geometry, blocks: MixedBlocks) -> None:
    """Scales the queries once for all KV blocks, so exp2 of a score needs no factor, and resets the state."""

    def plane(p: Any, carry: None) -> None:
        q = pltpu.bitcast(refs.q_blocks[q_half, p], g.dtype)
        refs.q_scaled[p] = (q.astype(jnp.float32) * (g.scale * math.log2(math.e))).astype(q.dtype)

    lax.fori_loop(0, g.num_k_planes, plane, None)
    refs.tops[...] = jnp.full(refs.tops.shape, paging.MASKED, jnp.float32)
    refs.values[...] = jnp.zeros(refs.values.shape, jnp.float32)
    tiles = entry.tiles

    @pl.when(tiles.mask_phase != refs.mask_phase[0])
    def _() -> None:
        refs.mask_phase[0] = tiles.mask_phase

        def make_mask(i: Any, carry: None) -> None:
            token = lax.broadcasted_iota(jnp.int32, refs.masks.shape[1:], 0)
            query = lax.div(lax.broadcasted_iota(jnp.int32, (1, blocks.tile_rows), 1), g.queries_per_plane)
            visible = token <= query + tiles.distance(i)
            refs.masks[i] = jnp.where(visible, -paging.MASKED, paging.MASKED)

        lax.fori_loop(1, refs.masks.shape[0], make_mask, None)


def _attend(refs: Refs, entry: Entry, kv: Any, live_words: Any, g: Geometry, blocks: MixedBlocks) -> None:
    """Folds one KV block into the state of one query block."""
    tiles = entry.tiles
    _clear_dead_words(kv, live_words, blocks.tile_tokens // g.kv_packing)
    slice_rows = SLICE_ROWS if blocks.tile_rows % SLICE_ROWS == 0 else LANES
    slices = [slice(begin, begin + slice_rows) for begin in range(0, blocks.tile_rows, slice_rows)]
    tile_words = blocks.tile_tokens // g.kv_packing
    even = (refs.scores_even, refs.unit_tops_even, refs.v_t_even)
    odd = (refs.scores_odd, refs.unit_tops_odd, refs.v_t_odd)

    def tile_of(plane: Any, kv_tile: Any) -> jax.Array:
        return paging.unpack_kv(kv[plane, pl.ds(pl.multiple_of(kv_tile * tile_words, tile_words), tile_words)], g)

    def prepare(unit: tuple[Any, Any, Any], buffers: tuple[Any, Any, Any], rows: slice) -> None:
        scores, unit_tops, v_t = buffers
        plane, q_tile, kv_tile = unit
        plane = jnp.minimum(plane, g.num_k_planes - 1)
        first = pl.multiple_of(q_tile * blocks.tile_rows + rows.start, slice_rows)
        s = paging.product(tile_of(plane, kv_tile), refs.q_scaled[plane, pl.ds(first, slice_rows)], 1, g)
        s = jnp.minimum(s, refs.masks[tiles.mask(q_tile, kv_tile), :, rows])
        scores[:, rows] = s
        unit_tops[:, rows] = jnp.max(s, axis=0, keepdims=True)
        if rows.start == 0:
            v_t[:LANES] = tile_of(g.v_plane(plane), kv_tile).T

    def fold(unit: tuple[Any, Any, Any], buffers: tuple[Any, Any, Any], rows: slice) -> None:
        scores, unit_tops, v_t = buffers
        plane, q_tile, _ = unit
        plane = jnp.minimum(plane, g.num_k_planes)  # units past the last one: a state that is never read
        old_top = refs.tops[plane, q_tile, :, rows]
        top = jnp.maximum(old_top, unit_tops[:, rows])
        weights = jnp.exp2(scores[:, rows] - top).astype(g.dtype)
        refs.tops[plane, q_tile, :, rows] = top
        kept = refs.values[plane, q_tile, :, rows] * jnp.exp2(old_top - top)
        refs.values[plane, q_tile, :, rows] = kept + paging.product(v_t[...], weights, 0, g)

    def turn(_: Any, unit: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        for j in range(blocks.units_per_turn):
            following = tiles.after(unit)
            for rows in slices:
                prepare(following, (odd, even)[j % 2], rows)
                fold(unit, (even, odd)[j % 2], rows)
            unit = following
        return unit

    for rows in slices:
        prepare(tiles.first, even, rows)
    lax.fori_loop(0, lax.div(tiles.count + (blocks.units_per_turn - 1), blocks.units_per_turn), turn, tiles.first)


def _clear_dead_words(kv: Any, live_words: Any, tile_words: int) -> None:
    """Zeroes the last tile after the live words: they may hold anything there, and 0 x NaN is NaN."""
    live = lax.rem(live_words, tile_words)
    begin = pl.multiple_of(live_words - live, tile_words)

    def plane(p: Any, carry: None) -> None:
        words = kv[p, pl.ds(begin, tile_words)]
        kv[p, pl.ds(begin, tile_words)] = paging.live_words_only(words, live)

    @pl.when(live > 0)
    def _() -> None:
        lax.fori_loop(0, kv.shape[0], plane, None)


def _store_q_block(refs: Refs, entry: Entry, half: Any, g: Geometry, blocks: MixedBlocks) -> None:
    row_words = g.queries_per_plane // g.query_packing
    tile_words = blocks.tile_rows // g.query_packing
    block, sem = refs.out_blocks.at[half], refs.out_sems.at[half]
    paging.wait_words(block, refs.out_words[half], sem)

    def plane(p: Any, carry: None) -> None:
        for t in range(refs.values.shape[1]):
            values = refs.values[p, t]
            normal = (values[:LANES] / values[LANES : LANES + 1]).T.astype(g.dtype)  # [rows, 128]
            block[p, t * tile_words : (t + 1) * tile_words] = pltpu.bitcast(normal, jnp.uint32)

    lax.fori_loop(0, g.num_k_planes, plane, None)
    num_words = entry.num_q * row_words
    refs.out_words[half] = num_words
    target = refs.out.at[:, pl.ds(entry.q_start * row_words, num_words)]
    pltpu.make_async_copy(block.at[:, pl.ds(0, num_words)], target, sem).start()


# Jitted, so that a model's layers trace and lower it once.
@functools.partial(jax.jit, static_argnames=("g", "blocks", "interpret"))
def attend(operands: Operands, *, g: Geometry, blocks: MixedBlocks, interpret: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs in the queries' shape (tokens of other rows keep their queries), and the pages."""
    queries, new_words, kv_pages, kv_lens, query_starts, new_pages, page_table, scalars = operands
    return pl.pallas_call(
        functools.partial(_kernel, g=g, blocks=blocks),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(1,),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 4,
            out_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 2,
            scratch_shapes=[*vmem_scratch(g, blocks), *other_scratch()],
        ),
        out_shape=(
            jax.ShapeDtypeStruct(queries.shape, queries.dtype),
            jax.ShapeDtypeStruct(kv_pages.shape, kv_pages.dtype),
        ),
        input_output_aliases={5: 0, 7: 1},
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=vmem_bytes(g, blocks), disable_bounds_checks=True),
        interpret=interpret,
        name="paged_attention_mixed",
    )(kv_lens, query_starts, new_pages, scalars, page_table, queries, new_words, kv_pages)
