"""The mixed kernel: rows of any number of tokens, mostly prompt chunks.

Its work is a list of entries: for each query block of each row, the KV blocks that it sees. A cursor (row, query block,
KV block) steps through them. The copies of the next entry, of any row, run while this entry is computed. Attention
reads K and V from pages only, so the new K/V of a query block are appended before its first KV block is fetched
(`append`).

    entry i:  wait for the window of the page table that names entry i+1's pages, start the copies of entry i+1's KV
              block into the other half of `kv_blocks` and of entry i+2's window; if entry i+1 begins a query block,
              wait for its append, and start the copies of its queries into the other half of `q_blocks`
              at a query block's beginning: wait for its queries, rotate and scale them; pack the new K/V of the query
              block after the next and start their copies to pages; start the copies of the one after that
              wait for entry i's KV block
              for every unit: `prepare` makes its scores, masks them, and transposes V; `fold` takes their softmax and
              adds the weighted values
              at a query block's last KV block: divide, transpose back, store into `out_blocks`, start the copy to HBM

What is done once per query block, with its queries and its outputs, is in `query_blocks`.

A unit is one plane, one tile of query rows and one tile of the block's tokens (see `tiles`). Where a block has few
queries, a unit has narrow tiles of several planes: the loop over units is there twice. `prepare` runs one unit
ahead of `fold`, in the other of two sets of buffers, and both alternate in slices of `slice_rows` query rows. They do
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

If all rows have few queries (`FewBlocks`), `spec_decode` computes instead; entries, copies and the append are the same.

`masks` holds the masks of a query block's units; number 0 masks nothing. They are recomputed only if they differ from
those of the previous query block.

`mixed_memory` lists the buffers; `entries` has the order of entries, with an example.

The semaphores: `kv_sems[half]`, `q_sems[half]` and `out_sems[half]` belong to the halves of their buffers, and
`window_sems[half]` to the window of the entry that will fill that half of `kv_blocks`. The kernel waits for the copies
out of a half of `out_blocks` before it stores into that half again, and at the end. `append_sems[half]` counts the new
words written from a half of `words`, `stage_sem` and `edge_sem` what is staged for them. `tile_sem` is for `out_tile`,
at the beginning and at the end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu import paging, query_blocks, spec_decode
from pallas_kernels.tpu.append import Appender
from pallas_kernels.tpu.entries import Cursor, Entry, entry_at, query_block_at
from pallas_kernels.tpu.layout import LANES, Geometry
from pallas_kernels.tpu.mixed_memory import SUM_ROWS, Operands, Refs, absent, other_scratch, vmem_bytes, vmem_scratch
from pallas_kernels.tpu.query_blocks import begin_output, end_output, reset_state, send_outputs, wait_for_outputs
from pallas_kernels.tpu.tiles import FewBlocks, MixedBlocks, Slice, Tiles


@dataclass(frozen=True, kw_only=True)
class _Body:
    """The kernel, for rows [begin_row, end_row)."""

    refs: Refs
    g: Geometry
    blocks: MixedBlocks | FewBlocks
    begin_row: Any
    end_row: Any
    pages: paging.Pages
    windows: paging.Windows
    appender: Appender

    @classmethod
    def of(cls, refs: Refs, g: Geometry, blocks: MixedBlocks | FewBlocks) -> _Body:
        begin_row, end_row = refs.scalars[0], refs.scalars[1]
        pages = paging.Pages(hbm=refs.pages, first_page=refs.scalars[2], geometry=g)
        return cls(
            refs=refs,
            g=g,
            blocks=blocks,
            begin_row=begin_row,
            end_row=end_row,
            pages=pages,
            windows=paging.Windows(
                table=refs.page_table,
                smem=refs.table_windows,
                sems=refs.window_sems,
                per_seq=refs.page_table.shape[0] // refs.kv_lens.shape[0],
            ),
            appender=Appender(refs=refs, g=g, blocks=blocks, end_row=end_row, pages=pages),
        )

    def run(self) -> None:
        refs = self.refs
        zero = jnp.int32(0)
        start = (self.begin_row, zero, zero)
        self.window(self.entry(start), 0).start()
        parts = [(self.begin_row, zero)]
        for _ in range(2):
            parts.append(self.part_after(*parts[-1]))
        for half in range(2):
            self.appender.stage(*parts[half])
            self.appender.write(*parts[half], half)
        self.appender.stage(*parts[2])
        if isinstance(self.blocks, MixedBlocks):
            _begin_tiles(refs, self.blocks)
        self.start_fetching(start, 0, 0)
        lax.while_loop(lambda carry: carry[0] < self.end_row, self.step, (*start, zero, zero))

    def step(self, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        """Computes one entry."""
        row, q_index, kv_index, kv_half, q_half = carry
        refs, g, blocks = self.refs, self.g, self.blocks
        entry = self.entry((row, q_index, kv_index))
        next_q_half = jnp.where(entry.is_last, 1 - q_half, q_half)

        @pl.when(entry.next[0] < self.end_row)
        def _() -> None:
            self.start_fetching(entry.next, 1 - kv_half, next_q_half)

        @pl.when(kv_index == 0)
        def _() -> None:
            for copy in self.query_copies(entry, q_half):
                copy.wait()
            if isinstance(blocks, FewBlocks):
                spec_decode.begin_queries(refs, entry, q_half, g, blocks)
            else:
                _for_width(blocks, entry, g, lambda own: query_blocks.begin_queries(refs, entry, q_half, g, own))
            after_next = self.part_after(*self.part_after(row, q_index))
            self.appender.write(*after_next, q_half)
            self.appender.stage(*self.part_after(*after_next))

        begin, end = entry.kv_words
        kv = refs.kv_blocks.at[kv_half]
        paging.wait_words(kv, end - begin, refs.kv_sems.at[kv_half])
        _clear_dead_words(kv, end - begin, blocks.tile_tokens // g.kv_packing)
        if isinstance(blocks, FewBlocks):
            spec_decode.attend(refs, entry, kv, end - begin, g, blocks)
        else:
            _for_width(blocks, entry, g, lambda own: _attend(refs, entry, kv, g, own))

        @pl.when(entry.is_last)
        def _() -> None:
            wait_for_outputs(refs, q_half)
            if isinstance(blocks, FewBlocks):
                spec_decode.finish_outputs(refs, entry.block, q_half, g, blocks)
            else:
                _for_width(blocks, entry, g, lambda own: query_blocks.finish_outputs(refs, entry.block, q_half, g, own))
            send_outputs(refs, entry.block, q_half, g)

        return *entry.next, 1 - kv_half, next_q_half

    def entry(self, cursor: Cursor) -> Entry:
        return entry_at(cursor, self.refs.kv_lens, self.refs.query_starts, self.g, self.blocks)

    def part_after(self, row: Any, q_index: Any) -> tuple[Any, Any]:
        """The query block after this one; of row `end_row`, or one past it, after the last."""
        last_row = jnp.minimum(row, self.refs.kv_lens.shape[0] - 1)
        refs = self.refs
        after = query_block_at(last_row, q_index, refs.kv_lens, refs.query_starts, self.g, self.blocks).next
        return jnp.where(row < self.end_row, after[0], row), after[1]

    def window(self, entry: Entry, half: Any) -> Any:
        return self.windows.copy(entry.block.row, entry.first_kv_page, half, 0)

    def query_copies(self, entry: Entry, half: Any) -> list[Any]:
        refs, g = self.refs, self.g
        num_rows = paging.whole_tiles(entry.block.num_q, g.token_tile)
        source, target = pl.ds(entry.block.start, num_rows), pl.ds(0, num_rows)
        queries, sem = refs.queries.at[source, pl.ds(0, g.query_columns)], refs.q_sems.at[half]
        copies = [pltpu.make_async_copy(queries, refs.q_blocks.at[half, target], sem)]
        if refs.rotation is not None:
            rotation = refs.rotation.at[source]
            copies.append(pltpu.make_async_copy(rotation, refs.q_rotations.at[half, target], sem))
        return copies

    def start_fetching(self, cursor: Cursor, kv_half: Any, q_half: Any) -> None:
        """Starts the copies of the entry at `cursor`, whose window is being copied, and of the next entry's window."""
        refs = self.refs
        entry = self.entry(cursor)

        @pl.when(entry.kv_index == 0)
        def _() -> None:
            for copy in self.query_copies(entry, q_half):
                copy.start()
            self.appender.wait(*cursor[:2], q_half)

        self.window(entry, kv_half).wait()
        begin, end = entry.kv_words
        page_of = functools.partial(self.windows.page, kv_half, 0)
        paging.fetch(self.pages, page_of, begin, end, refs.kv_blocks.at[kv_half], refs.kv_sems.at[kv_half])

        @pl.when(entry.next[0] < self.end_row)
        def _() -> None:
            self.window(self.entry(entry.next), 1 - kv_half).start()


def _kernel(*refs: Any, g: Geometry, blocks: MixedBlocks | FewBlocks, kv_column: int, absent: tuple[str, ...]) -> None:
    names = [field.name for field in fields(Refs) if field.name not in ("kv_column", *absent)]
    # The aliased inputs come after the others: the kernel uses the outputs.
    num_inputs = names.index("out")
    given = dict(zip(names, refs[:num_inputs] + refs[num_inputs + 2 :], strict=True))
    body = _Body.of(Refs(kv_column=kv_column, **dict.fromkeys(absent), **given), g, blocks)
    begin_output(body.refs, body.begin_row, g)
    pl.when(body.begin_row < body.end_row)(body.run)
    end_output(body.refs, body.end_row, g)


def _for_width(blocks: MixedBlocks, entry: Entry, g: Geometry, body: Callable[[MixedBlocks], None]) -> None:
    """Calls `body` with the sizes for as many queries as the entry has: the loop over units is there twice."""
    narrow = blocks.narrow(g)
    if narrow is None:
        body(blocks)
        return
    is_narrow = entry.block.num_q <= narrow.q_block
    pl.when(is_narrow)(lambda: body(narrow))
    pl.when(jnp.logical_not(is_narrow))(lambda: body(blocks))


def _begin_tiles(refs: Refs, blocks: MixedBlocks) -> None:
    """Prepares the buffers for the loop over units."""
    for v_t in (refs.v_t_even, refs.v_t_odd):
        v_t[:, LANES:] = jnp.ones((v_t.shape[0], SUM_ROWS, blocks.tile_tokens), v_t.dtype)
    # Without this use outside the loop over units, the compiler would keep the buffer in registers and spill it.
    refs.scores_odd[:8, :LANES] = jnp.zeros((8, LANES), jnp.float32)
    refs.masks[0] = jnp.full(refs.masks.shape[1:], -paging.MASKED, jnp.float32)
    refs.mask_phase[0] = -1
    reset_state(refs, ())


def _attend(refs: Refs, entry: Entry, kv: Any, g: Geometry, blocks: MixedBlocks) -> None:
    """Adds one KV block to the state of one query block. The block has zeros after its live words."""
    tiles = Tiles.of(g, blocks, num_q=entry.block.num_q, position=entry.position)
    mask_rows, slices, num_planes = blocks.mask_rows(g), blocks.slices(g), blocks.planes_of_unit(g)
    tile_words = blocks.tile_tokens // g.kv_packing
    even = (refs.scores_even, refs.unit_tops_even, refs.v_t_even)
    odd = (refs.scores_odd, refs.unit_tops_odd, refs.v_t_odd)

    def tile_of(plane: Any, kv_tile: Any) -> jax.Array:
        return paging.unpack_kv(kv[plane, pl.ds(pl.multiple_of(kv_tile * tile_words, tile_words), tile_words)], g)

    def prepare(unit: tuple[Any, Any, Any], buffers: tuple[Any, Any, Any], part: Slice) -> None:
        scores, unit_tops, v_t = buffers
        planes, q_tile, kv_tile = unit
        plane, begin = jnp.minimum(planes * num_planes + part.plane, g.num_k_planes - 1), part.rows.start
        first = pl.multiple_of(q_tile * blocks.tile_rows + begin, blocks.slice_rows)
        s = paging.product(tile_of(plane, kv_tile), refs.q_scaled[plane, pl.ds(first, blocks.slice_rows)], 1, g)
        in_mask = begin % mask_rows
        s = jnp.minimum(s, refs.masks[tiles.mask(q_tile, kv_tile), :, in_mask : in_mask + blocks.slice_rows])
        scores[:, part.columns] = s
        unit_tops[:, part.columns] = jnp.max(s, axis=0, keepdims=True)
        if begin == 0:
            v_t[part.plane, :LANES] = tile_of(g.v_plane(plane), kv_tile).T

    def fold(unit: tuple[Any, Any, Any], buffers: tuple[Any, Any, Any], part: Slice) -> None:
        scores, unit_tops, v_t = buffers
        planes, q_tile, _ = unit
        # Units past the last one: a state that is never read.
        plane, rows = jnp.minimum(planes * num_planes + part.plane, g.num_k_planes), part.rows
        old_top = refs.tops[plane, q_tile, :, rows]
        top = jnp.maximum(old_top, unit_tops[:, part.columns])
        weights = jnp.exp2(scores[:, part.columns] - top).astype(g.dtype)
        refs.tops[plane, q_tile, :, rows] = top
        kept = refs.values[plane, q_tile, :, rows] * jnp.exp2(old_top - top)
        refs.values[plane, q_tile, :, rows] = kept + paging.product(v_t[part.plane], weights, 0, g)

    def turn(_: Any, unit: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        for j in range(blocks.units_per_turn):
            following = tiles.after(unit)
            for part in slices:
                prepare(following, (odd, even)[j % 2], part)
                fold(unit, (even, odd)[j % 2], part)
            unit = following
        return unit

    for part in slices:
        prepare(tiles.first, even, part)
    lax.fori_loop(0, lax.div(tiles.count + (blocks.units_per_turn - 1), blocks.units_per_turn), turn, tiles.first)


def _clear_dead_words(kv: Any, live_words: Any, tile_words: int) -> None:
    """Sets the last tile to zero after the live words: it may hold NaN there, and 0 x NaN is NaN."""
    live = lax.rem(live_words, tile_words)
    begin = pl.multiple_of(live_words - live, tile_words)

    def plane(p: Any, carry: None) -> None:
        words = kv[p, pl.ds(begin, tile_words)]
        kv[p, pl.ds(begin, tile_words)] = paging.live_words_only(words, live)

    @pl.when(live > 0)
    def _() -> None:
        lax.fori_loop(0, kv.shape[0], plane, None)


# Jitted, so that a model's layers trace and lower it once.
@functools.partial(jax.jit, static_argnames=("g", "kv_column", "blocks", "interpret"))
def attend(
    operands: Operands, *, g: Geometry, kv_column: int, blocks: MixedBlocks | FewBlocks, interpret: Any
) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs, with those of the single-token rows and zeros for the tokens that pad the step, and the
    pages."""
    o = operands
    missing = tuple(name for name in ("kv_scales", "rotation") if getattr(o, name) is None)
    scalars = [o.kv_lens, o.query_starts, o.new_pages, o.scalars] + ([] if o.kv_scales is None else [o.kv_scales])
    inputs = [o.page_table, o.queries, o.new_kv] + ([] if o.rotation is None else [o.rotation])
    first_aliased = len(scalars) + len(inputs)
    return pl.pallas_call(
        functools.partial(_kernel, g=g, blocks=blocks, kv_column=kv_column, absent=(*missing, *absent(blocks))),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(1,),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * (len(inputs) + 2),
            out_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 2,
            scratch_shapes=[*vmem_scratch(g, blocks), *other_scratch(blocks)],
        ),
        out_shape=(
            jax.ShapeDtypeStruct(o.out.shape, o.out.dtype),
            jax.ShapeDtypeStruct(o.kv_pages.shape, o.kv_pages.dtype),
        ),
        input_output_aliases={first_aliased: 0, first_aliased + 1: 1},
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=vmem_bytes(g, blocks), disable_bounds_checks=True),
        interpret=interpret,
        name="paged_attention_mixed",
    )(*scalars, *inputs, o.out, o.kv_pages)
