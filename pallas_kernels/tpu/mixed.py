"""The mixed kernel: rows of any number of tokens, prompt chunks above all.

First every row's new K/V go from HBM to their pages in HBM (`append`), then attention reads pages only. The attention
walks the rows' query blocks, and for each the KV blocks that it sees, in one list with a cursor (row, query block, KV
block); the copies of the next entry, whoever's it is, run while this one computes.

    entry i:  start the copies of entry i+1's KV block into the other half of `kv_blocks`; where entry i+1 begins a
              query block, also those of its queries into the other half of `q_blocks`
              wait for entry i's KV block (and its queries, at a query block's beginning)
              for every unit, a plane and a tile of query rows: `prepare` makes its scores, masks them where a query
              does not see the whole block, and transposes V; `fold` takes their softmax and adds the weighted values.
              `prepare` runs one unit ahead of `fold`, in the other of two sets of buffers (even and odd units)
              at a query block's last KV block: divide, transpose back, store into `out_blocks`, start the copy to HBM

Everything is computed transposed, tokens down and query rows across:

    scores^T  [tokens, rows]   = K Q^T
    weights^T [tokens, rows]   = exp2(scores^T - maximum over tokens)
    values^T  [128 + 16, rows] = [V | 1]^T weights^T

Then the maximum over tokens is taken between registers, not within them; the weights stand as the matrix unit wants its
stationary operand; and 128 rows of V^T stream past it, so that head_dim 128 fills a 256 x 256 unit that V as it lies
would leave half empty. Ones below V^T make the sum of the weights one more row of the values: it costs no vector
instruction.

Who waits for what: `kv_sems[half]`, `q_sems[half]` and `out_sems[half]` belong to the halves of their buffers; a half
of `out_blocks` is waited for when it is stored into again, and at the end. `append_sem` counts the new words written to
pages; all of them have arrived before the first KV block is fetched.
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
from pallas_kernels.tpu.layout import LANES, Geometry

SUM_ROWS = 16  # rows of ones below V^T: one bf16 register tile; the first is read


@dataclass(frozen=True, kw_only=True)
class MixedBlocks:
    q_block: int  # tokens of one query block
    kv_block: int  # tokens of one KV block
    tile_rows: int  # query rows computed at a time
    units_per_turn: int  # even: planes x tiles in one turn of the loop


@dataclass(frozen=True, kw_only=True)
class _Refs:
    """The kernel's operands and scratch, by name."""

    kv_lens: Any  # i32[S] in SMEM
    query_starts: Any  # i32[S + 1] in SMEM
    queries: Any  # uint32[num_k_planes, T * row_words, 128] in HBM, aliased to out
    new_words: Any  # uint32[planes, W, 128] in HBM: each row's new words, see `append`
    out: Any
    pages: paging.Pages
    q_blocks: Any  # uint32[2, num_k_planes, q_block * row_words, 128]
    q_scaled: Any  # [num_k_planes, q_block * queries_per_plane, 128]
    kv_blocks: Any  # uint32[2, planes, block_words, 128]
    scores_even: Any  # f32[kv_block, tile_rows]
    scores_odd: Any
    block_top_even: Any  # f32[1, tile_rows]: the scores' maximum over tokens
    block_top_odd: Any
    v_t_even: Any  # [128 + SUM_ROWS, kv_block]
    v_t_odd: Any
    tops: Any  # f32[num_k_planes + 1, tiles, 1, tile_rows]: the running maximum
    values: Any  # f32[num_k_planes + 1, tiles, 128 + SUM_ROWS, tile_rows]: the running sums, relative to it
    out_blocks: Any  # uint32[2, num_k_planes, q_block * row_words, 128]
    edge: Any  # uint32[2, planes, 1, 128]
    out_words: Any  # i32[2] in SMEM: words on their way out of each half of out_blocks
    kv_sems: Any
    q_sems: Any
    out_sems: Any
    append_sem: Any


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """One KV block of one query block."""

    row: Any
    q_index: Any
    kv_index: Any
    q_start: Any  # the query block's first token in the step
    num_q: Any  # its live tokens
    position: Any  # its first token's position in the sequence
    num_kv: Any  # tokens that its last query sees
    is_last: Any  # the query block's last KV block
    next: tuple[Any, Any, Any]  # the following entry's row, q_index, kv_index


def _entry(refs: _Refs, row: Any, q_index: Any, kv_index: Any, blocks: MixedBlocks) -> _Entry:
    begin, end = refs.query_starts[row], refs.query_starts[row + 1]
    q_start = begin + q_index * blocks.q_block
    num_q = jnp.minimum(blocks.q_block, end - q_start)
    position = refs.kv_lens[row] - end + q_start
    num_kv = position + num_q
    is_last = (kv_index + 1) * blocks.kv_block >= num_kv
    row_ends = is_last & (q_start + num_q >= end)
    following = (
        jnp.where(row_ends, row + 1, row),
        jnp.where(row_ends, 0, jnp.where(is_last, q_index + 1, q_index)),
        jnp.where(is_last, 0, kv_index + 1),
    )
    return _Entry(
        row=row, q_index=q_index, kv_index=kv_index, q_start=q_start, num_q=num_q, position=position, num_kv=num_kv,
        is_last=is_last, next=following,
    )  # fmt: skip


def _kv_words(entry: _Entry, blocks: MixedBlocks, packing: int) -> tuple[Any, Any]:
    begin = entry.kv_index * (blocks.kv_block // packing)
    return begin, jnp.minimum(paging.words_of(entry.num_kv, packing), begin + blocks.kv_block // packing)


def _kernel(
    kv_lens: Any,
    page_table: Any,
    query_starts: Any,
    scalars: Any,  # i32[3]: the first row, the row past the last, first_page
    queries: Any,
    new_words: Any,
    pages_in: Any,
    out: Any,
    pages_hbm: Any,
    *scratch: Any,
    g: Geometry,
    blocks: MixedBlocks,
    pages_per_seq: int,
) -> None:
    del pages_in
    begin_row, end_row = scalars[0], scalars[1]
    pages = paging.Pages(
        hbm=pages_hbm, table=page_table, pages_per_seq=pages_per_seq, first_page=scalars[2], geometry=g
    )
    names = list(_Refs.__dataclass_fields__)
    refs = _Refs(
        kv_lens=kv_lens, query_starts=query_starts, queries=queries, new_words=new_words, out=out, pages=pages,
        **dict(zip(names[names.index("q_blocks") :], scratch, strict=True)),
    )  # fmt: skip
    row_words = g.queries_per_plane // g.packing

    def start_fetching(entry: _Entry, kv_half: Any, q_half: Any) -> None:
        begin, end = _kv_words(entry, blocks, g.packing)
        paging.fetch(pages, entry.row, begin, end, refs.kv_blocks.at[kv_half], refs.kv_sems.at[kv_half])

        @pl.when(entry.kv_index == 0)
        def _() -> None:
            num_words = entry.num_q * row_words
            source = queries.at[:, pl.ds(entry.q_start * row_words, num_words)]
            target = refs.q_blocks.at[q_half, :, pl.ds(0, num_words)]
            pltpu.make_async_copy(source, target, refs.q_sems.at[q_half]).start()

    def step(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        row, q_index, kv_index, kv_half, q_half = carry
        entry = _entry(refs, row, q_index, kv_index, blocks)
        next_q_half = jnp.where(entry.is_last, 1 - q_half, q_half)

        @pl.when(entry.next[0] < end_row)
        def _() -> None:
            start_fetching(_entry(refs, *entry.next, blocks), 1 - kv_half, next_q_half)

        @pl.when(kv_index == 0)
        def _() -> None:
            paging.wait_words(refs.q_blocks.at[q_half], entry.num_q * row_words, refs.q_sems.at[q_half])
            _begin_q_block(refs, q_half, g)

        begin, end = _kv_words(entry, blocks, g.packing)
        paging.wait_words(refs.kv_blocks.at[kv_half], end - begin, refs.kv_sems.at[kv_half])
        _attend(refs, entry, refs.kv_blocks.at[kv_half], end - begin, g, blocks)

        @pl.when(entry.is_last)
        def _() -> None:
            _store_q_block(refs, entry, q_half, g, blocks)

        return *entry.next, 1 - kv_half, next_q_half

    @pl.when(begin_row < end_row)
    def _() -> None:
        append.append_rows(
            begin_row,
            end_row,
            kv_lens=kv_lens,
            query_starts=query_starts,
            new_words=new_words,
            pages=pages,
            edge=refs.edge,
            sem=refs.append_sem,
        )
        for v_t in (refs.v_t_even, refs.v_t_odd):
            v_t[LANES:] = jnp.ones((SUM_ROWS, blocks.kv_block), v_t.dtype)
        for half in range(2):
            refs.out_words[half] = 0
        start_fetching(_entry(refs, begin_row, 0, 0, blocks), 0, 0)
        zero = jnp.int32(0)
        lax.while_loop(lambda carry: carry[0] < end_row, step, (begin_row, zero, zero, zero, zero))
        for half in range(2):
            paging.wait_words(refs.out_blocks.at[half], refs.out_words[half], refs.out_sems.at[half])


def _begin_q_block(refs: _Refs, q_half: Any, g: Geometry) -> None:
    """Scales the queries once for all KV blocks, so that exp2 of a score needs no product, and empties the state."""

    def plane(p: Any, carry: None) -> None:
        q = paging.unpack(refs.q_blocks[q_half, p], g)
        refs.q_scaled[p] = (q.astype(jnp.float32) * (g.scale * math.log2(math.e))).astype(q.dtype)

    lax.fori_loop(0, g.num_k_planes, plane, None)
    refs.tops[...] = jnp.full(refs.tops.shape, paging.MASKED, jnp.float32)
    refs.values[...] = jnp.zeros(refs.values.shape, jnp.float32)


def _attend(refs: _Refs, entry: _Entry, kv: Any, live_words: Any, g: Geometry, blocks: MixedBlocks) -> None:
    """Folds one KV block into the state of one query block."""
    position = entry.position - entry.kv_index * blocks.kv_block  # of the first query, within the KV block
    every_query_sees_all = position >= blocks.kv_block - 1

    @pl.when(every_query_sees_all)
    def _() -> None:
        _attend_units(refs, entry, kv, live_words, None, g, blocks)

    @pl.when(~every_query_sees_all)
    def _() -> None:
        _attend_units(refs, entry, kv, live_words, position, g, blocks)


def _attend_units(
    refs: _Refs, entry: _Entry, kv: Any, live_words: Any, position: Any, g: Geometry, blocks: MixedBlocks
) -> None:
    """A unit is one plane and one tile of query rows. While one unit is folded, the next one's scores are made.

    The two live in buffers of their own, and several units are written out in a turn of the loop, so that the compiler
    sees that nothing of the one depends on the other, and fills the matrix unit and the vector units at once.
    """
    num_tiles = lax.div(entry.num_q * g.queries_per_plane + (blocks.tile_rows - 1), blocks.tile_rows)
    num_units = g.num_k_planes * num_tiles
    even = (refs.scores_even, refs.block_top_even, refs.v_t_even)
    odd = (refs.scores_odd, refs.block_top_odd, refs.v_t_odd)

    def prepare(unit: Any, buffers: tuple[Any, Any, Any]) -> None:
        unit = jnp.minimum(unit, num_units - 1)
        p, t = lax.div(unit, num_tiles), lax.rem(unit, num_tiles)
        scores, block_top, v_t = buffers
        rows = pl.ds(pl.multiple_of(t * blocks.tile_rows, blocks.tile_rows), blocks.tile_rows)
        s = _product(paging.unpack(kv[p], g), refs.q_scaled[p, rows], 1, g)  # [tokens, rows]
        if position is not None:
            token = lax.broadcasted_iota(jnp.int32, s.shape, 0)
            row = lax.broadcasted_iota(jnp.int32, (1, blocks.tile_rows), 1) + t * blocks.tile_rows
            s = jnp.where(token <= position + lax.div(row, g.queries_per_plane), s, paging.MASKED)
        scores[...] = s
        block_top[...] = jnp.max(s, axis=0, keepdims=True)
        v = paging.live_words_only(kv[g.v_plane(p)], live_words)
        v_t[:LANES] = paging.unpack(v, g).T

    def fold(unit: Any, buffers: tuple[Any, Any, Any]) -> None:
        p, t = lax.div(unit, num_tiles), lax.rem(unit, num_tiles)
        p = jnp.minimum(p, g.num_k_planes)  # past the last unit: a state that nobody reads
        scores, block_top, v_t = buffers
        old_top = refs.tops[p, t]
        top = jnp.maximum(old_top, block_top[...])
        weights = jnp.exp2(scores[...] - top).astype(g.dtype)
        refs.tops[p, t] = top
        refs.values[p, t] = refs.values[p, t] * jnp.exp2(old_top - top) + _product(v_t[...], weights, 0, g)

    def turn(i: Any, carry: None) -> None:
        for j in range(blocks.units_per_turn):
            unit, ahead = blocks.units_per_turn * i + j, (even, odd)[1 - j % 2]
            prepare(unit + 1, ahead)
            fold(unit, (even, odd)[j % 2])

    prepare(0, even)
    lax.fori_loop(0, lax.div(num_units + (blocks.units_per_turn - 1), blocks.units_per_turn), turn, None)


def _product(a: jax.Array, b: jax.Array, contract_b: int, g: Geometry) -> jax.Array:
    precision = lax.Precision.HIGHEST if g.dtype == jnp.float32 else None
    return lax.dot_general(
        a, b, (((1,), (contract_b,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def _store_q_block(refs: _Refs, entry: _Entry, half: Any, g: Geometry, blocks: MixedBlocks) -> None:
    row_words = g.queries_per_plane // g.packing
    tile_words = blocks.tile_rows // g.packing
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
@functools.partial(jax.jit, static_argnames=("g", "blocks", "pages_per_seq", "interpret"))
def attend(
    queries: jax.Array,  # uint32[num_k_planes, T * row_words, 128]
    new_words: jax.Array,  # uint32[planes, W, 128]
    kv_pages: jax.Array,  # uint32[P, planes, page_words, 128]
    kv_lens: jax.Array,  # i32[S]
    page_table: jax.Array,  # i32[S * pages_per_seq]
    query_starts: jax.Array,  # i32[S + 1]
    scalars: jax.Array,  # i32[3]: the first row, the row past the last, first_page
    *,
    g: Geometry,
    blocks: MixedBlocks,
    pages_per_seq: int,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs in the queries' place (other rows': their queries), and the pages."""
    row_words = g.queries_per_plane // g.packing
    block_rows = blocks.q_block * g.queries_per_plane
    tiles = block_rows // blocks.tile_rows
    block_words = blocks.kv_block // g.packing
    vmem = [
        pltpu.VMEM((2, g.num_k_planes, blocks.q_block * row_words, LANES), jnp.uint32),
        pltpu.VMEM((g.num_k_planes, block_rows, LANES), g.dtype),
        pltpu.VMEM((2, g.num_planes, block_words, LANES), jnp.uint32),
        *[pltpu.VMEM((blocks.kv_block, blocks.tile_rows), jnp.float32)] * 2,
        *[pltpu.VMEM((1, blocks.tile_rows), jnp.float32)] * 2,
        *[pltpu.VMEM((LANES + SUM_ROWS, blocks.kv_block), g.dtype)] * 2,
        pltpu.VMEM((g.num_k_planes + 1, tiles, 1, blocks.tile_rows), jnp.float32),
        pltpu.VMEM((g.num_k_planes + 1, tiles, LANES + SUM_ROWS, blocks.tile_rows), jnp.float32),
        pltpu.VMEM((2, g.num_k_planes, blocks.q_block * row_words, LANES), jnp.uint32),
        pltpu.VMEM((2, g.num_planes, 1, LANES), jnp.uint32),
    ]
    scratch_bytes = sum(math.prod(s.shape) * jnp.dtype(s.dtype).itemsize for s in vmem)
    return pl.pallas_call(
        functools.partial(_kernel, g=g, blocks=blocks, pages_per_seq=pages_per_seq),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(1,),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 3,
            out_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 2,
            scratch_shapes=[
                *vmem,
                pltpu.SMEM((2,), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA,
            ],
        ),
        out_shape=(
            jax.ShapeDtypeStruct(queries.shape, queries.dtype),
            jax.ShapeDtypeStruct(kv_pages.shape, kv_pages.dtype),
        ),
        input_output_aliases={4: 0, 6: 1},
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=scratch_bytes + (16 << 20), disable_bounds_checks=True),
        interpret=interpret,
        name="paged_attention_mixed",
    )(kv_lens, page_table, query_starts, scalars, queries, new_words, kv_pages)
