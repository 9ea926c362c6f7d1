"""The decode kernel: rows of one token each, several sequences at a time.

The work is a list of items, an item being one block of `kv_block` tokens of one sequence; a long sequence has many, and
they follow one another. Nothing of the list is stored: a cursor (row, block) steps through it. One turn of the loop
takes `items_per_turn` consecutive items, whoever they belong to, so that sequences of unlike length never wait for each
other.

    turn i:   wait for the windows of the page table that turn i+1's items need, start the copies of its items into the
                  other half of `kv_blocks` (HBM -> VMEM, live words only), and of turn i+2's windows (HBM -> SMEM)
              wait for the copies of turn i's items
              last block of a sequence: merge the new token's word into the block, start its write-back (VMEM -> HBM)
              for every item, in straight-line code so that the scheduler interleaves them:
                  scores = q K^T, masked; softmax over this block alone; its sum and P V; fold into the running state
                  last block of a sequence: divide, store the row's output over its query

An example: rows of 600, 100 and 1030 tokens, their new ones included; blocks of 512 tokens, two items a turn.

    turn 0:   row 0, tokens 0-511     row 0, tokens 512-599, its last: output
    turn 1:   row 1, tokens 0-99      row 2, tokens 0-511         row 1 needs one block only: output
    turn 2:   row 2, tokens 512-1023  row 2, tokens 1024-1029     output; the running state went from turn to turn

While turn 0 computes, turn 1's copies run: of row 1 its 99 cached tokens, 50 words. Its new token, number 99, is then
put next to token 98 into the last of them in VMEM, and this word alone goes back to the row's page.

Who waits for what:
- `kv_sems[half]`    copies into that half of `kv_blocks`; waited for at the beginning of the turn that computes on it.
                     The other half is refilled only after the turn that read it has ended.
- `window_sems[half]` the page table's windows of the turn that fills that half of `kv_blocks`: waited for just before.
- `load_sem`         queries and new words of all rows, once, before the first turn.
- `append_sem`       the write-backs, all at once, after the last turn: their source `new_words` is never reused.
- `store_sem`        the outputs, once, after the last turn.

The heads: planes are taken in groups whose query rows fill one bf16 register tile (16 rows). A group's queries stand on
a block diagonal, [rows, planes x 128] with zeros elsewhere, so that one product scores all its heads: what the matrix
unit pays for in decode is pushing K and V into it, not multiplying zeros.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu import paging
from pallas_kernels.tpu.layout import LANES, Geometry

ROW_TILE = 16  # query rows of one bf16 register tile


@dataclass(frozen=True, kw_only=True)
class DecodeBlocks:
    kv_block: int  # tokens of one item
    items_per_turn: int


@dataclass(frozen=True, kw_only=True)
class Groups:
    """How planes are grouped: `planes` planes share a tile of `rows` query rows."""

    count: int
    planes: int
    rows: int


def group_planes(g: Geometry) -> Groups:
    fitting = [
        n for n in range(1, g.num_k_planes + 1) if g.num_k_planes % n == 0 and n * g.queries_per_plane <= ROW_TILE
    ]
    planes = max(fitting, default=1)
    rows = -(-planes * g.queries_per_plane // ROW_TILE) * ROW_TILE
    return Groups(count=g.num_k_planes // planes, planes=planes, rows=rows)


def _kernel(
    # scalars
    kv_lens: Any,  # i32[S]
    new_pages: Any,  # i32[D]: the page of each row's new token
    scalars: Any,  # i32[2]: num_singles, first_page
    # HBM
    page_table: Any,  # i32[S * windows_per_seq, 1, 128]
    queries: Any,  # [D, rows, 128], aliased to out
    new_hbm: Any,  # uint32[planes, D, 128]: each row's token, in its place of its word
    pages_in: Any,  # aliased to pages_hbm
    out: Any,  # [D, rows, 128]
    pages_hbm: Any,  # uint32[P, planes, page_words, 128]
    # VMEM
    rows: Any,  # [D + 1, rows, 128]: queries, overwritten by outputs; the last row takes what belongs to no row
    new_words: Any,  # uint32[planes, D, 128]
    kv_blocks: Any,  # uint32[2, items, planes, block_words, 128]
    state: Any,  # f32[groups, 3, group_rows, 128]: the running maximum, sum and weighted values
    table_windows: Any,  # i32[2, items, 1, 128] in SMEM
    window_sems: Any,
    kv_sems: Any,
    load_sem: Any,
    append_sem: Any,
    store_sem: Any,
    *,
    g: Geometry,
    blocks: DecodeBlocks,
) -> None:
    del pages_in
    num_singles, first_page = scalars[0], scalars[1]
    pages = paging.Pages(hbm=pages_hbm, first_page=first_page, geometry=g)
    windows = paging.Windows(
        table=page_table, smem=table_windows, sems=window_sems, per_seq=page_table.shape[0] // kv_lens.shape[0]
    )
    last_row = rows.shape[0] - 1
    kv_block, block_words = blocks.kv_block, blocks.kv_block // g.packing

    def kv_len_of(row: Any) -> Any:
        return kv_lens[jnp.minimum(row, last_row - 1)]

    def items_from(row: Any, block: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, Any]]:
        items = []
        for _ in range(blocks.items_per_turn):
            items.append((row, block))
            ended = (block + 1) * kv_block >= kv_len_of(row)
            row, block = jnp.where(ended, row + 1, row), jnp.where(ended, 0, block + 1)
        return items, (row, block)

    def cached_words(row: Any, block: Any) -> tuple[Any, Any]:
        """The range of words of the block that are in pages already: the new token is not."""
        begin = block * block_words
        cached = jnp.where(row < num_singles, kv_len_of(row) - 1, 0)
        return begin, jnp.clip(paging.words_of(cached, g.packing), begin, begin + block_words)

    def for_each_window(items: list[tuple[Any, Any]], half: Any, body: Any) -> None:
        for i, (row, block) in enumerate(items):

            @pl.when(row < num_singles)
            def _(i: int = i, row: Any = row, block: Any = block) -> None:
                body(windows.copy(row, lax.div(block * kv_block, g.page_size), half, i))

    def start_fetching(items: list[tuple[Any, Any]], following: list[tuple[Any, Any]], half: Any) -> None:
        """Starts the copies of `items`, whose windows are on their way, and of the windows of the `following`."""
        for_each_window(items, half, lambda copy: copy.wait())
        for i, (row, block) in enumerate(items):
            begin, end = cached_words(row, block)
            page_of = partial(windows.page, half, i)
            paging.fetch(pages, page_of, begin, end, kv_blocks.at[half, i], kv_sems.at[half])
        for_each_window(following, 1 - half, lambda copy: copy.start())

    def wait_for(items: list[tuple[Any, Any]], half: Any) -> None:
        for i, (row, block) in enumerate(items):
            begin, end = cached_words(row, block)
            paging.wait_words(kv_blocks.at[half, i], end - begin, kv_sems.at[half])

    def append(row: Any, block: Any, kv: Any) -> None:
        """Merges the row's new token into the block, if it is its last, and starts the write-back of its word."""
        position = kv_len_of(row) - 1
        word = lax.div(position, g.packing)

        @pl.when((row < num_singles) & (word < (block + 1) * block_words))
        def _() -> None:
            in_block = pl.ds(word - block * block_words, 1)
            merged = new_words[:, pl.ds(row, 1)]
            if g.packing == 2:  # the word's first token may be an older one
                old = kv[:, in_block] & jnp.uint32(0xFFFF)
                merged = jnp.where(lax.rem(position, 2) == 1, merged | old, merged)
            kv[:, in_block] = merged
            new_words[:, pl.ds(row, 1)] = merged
            target = pages.words(new_pages[row], word, 1)
            pltpu.make_async_copy(new_words.at[:, pl.ds(row, 1)], target, append_sem).start()

    def turn(carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        row, block, half = carry
        items, after = items_from(row, block)
        next_items, after_next = items_from(*after)
        start_fetching(next_items, items_from(*after_next)[0], 1 - half)
        wait_for(items, half)
        for i, item in enumerate(items):
            append(*item, kv_blocks.at[half, i])
        for i, (row, block) in enumerate(items):
            valid = row < num_singles
            live = jnp.where(valid, kv_len_of(row) - block * kv_block, 0)
            _attend(
                kv_blocks.at[half, i],
                rows.at[jnp.where(valid, row, last_row)],
                state,
                live=live,
                is_first=block == 0,
                is_last=live <= kv_block,
                g=g,
            )
        return *after, 1 - half

    @pl.when(num_singles > 0)
    def _() -> None:
        first, after = items_from(0, 0)
        for_each_window(first, 0, lambda copy: copy.start())
        start_fetching(first, items_from(*after)[0], 0)
        live_rows = pl.ds(0, num_singles)
        loads = [
            pltpu.make_async_copy(queries.at[live_rows], rows.at[live_rows], load_sem),
            pltpu.make_async_copy(new_hbm.at[:, live_rows], new_words.at[:, live_rows], load_sem),
        ]
        for load in loads:
            load.start()
        for load in loads:
            load.wait()
        lax.while_loop(lambda carry: carry[0] < num_singles, turn, (jnp.int32(0), jnp.int32(0), jnp.int32(0)))
        store = pltpu.make_async_copy(rows.at[live_rows], out.at[live_rows], store_sem)
        store.start()
        paging.wait_words(new_words, num_singles, append_sem)
        store.wait()


def _attend(
    kv: Any,  # uint32[planes, block_words, 128]
    row: Any,  # [rows, 128]: this row's queries; its output on its last block
    state: Any,  # f32[groups, 3, group_rows, 128]
    *,
    live: Any,  # tokens of the block that the query sees; past the block's end: all of them
    is_first: Any,
    is_last: Any,
    g: Geometry,
) -> None:
    groups = group_planes(g)
    live_words = paging.words_of(live, g.packing)
    for i in range(groups.count):
        planes = range(i * groups.planes, (i + 1) * groups.planes)
        tile = pl.ds(i * groups.rows, groups.rows)
        q = row[tile]
        k = jnp.concatenate([paging.unpack(kv[p], g) for p in planes], axis=1)
        # V past the live words is zeroed: what lies there may be anything, and 0 x NaN is NaN.
        v = jnp.concatenate(
            [paging.unpack(paging.live_words_only(kv[g.v_plane(p)], live_words), g) for p in planes], axis=1
        )
        scores = paging.product(_spread(q, groups.planes, g), k, 1, g) * (g.scale * math.log2(math.e))
        token = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        scores = jnp.where(token < live, scores, paging.MASKED)
        top = jnp.max(scores, axis=1, keepdims=True)
        weights = jnp.exp2(scores - top)
        total = jnp.sum(weights, axis=1, keepdims=True)
        values = _gather(paging.product(weights.astype(g.dtype), v, 0, g), groups.planes, g)

        old_top = jnp.where(is_first, paging.MASKED, state[i, 0])
        new_top = jnp.maximum(old_top, top)
        keep, add = jnp.exp2(old_top - new_top), jnp.exp2(top - new_top)
        new_total = jnp.where(is_first, 0.0, state[i, 1]) * keep + total * add
        new_values = jnp.where(is_first, 0.0, state[i, 2]) * keep + values * add
        state[i, 0], state[i, 1], state[i, 2] = new_top, new_total, new_values
        row[tile] = jnp.where(is_last, (new_values / new_total).astype(q.dtype), q)


def _spread(q: jax.Array, planes: int, g: Geometry) -> jax.Array:
    """[rows, 128] -> [rows, planes * 128]: each plane's rows keep their lanes, the others are zero there."""
    plane = lax.div(lax.broadcasted_iota(jnp.int32, q.shape, 0), g.queries_per_plane)
    q = q.astype(jnp.float32)
    return jnp.concatenate([jnp.where(plane == p, q, 0.0).astype(g.dtype) for p in range(planes)], axis=1)


def _gather(values: jax.Array, planes: int, g: Geometry) -> jax.Array:
    """[rows, planes * 128] -> [rows, 128]: each row's own plane."""
    own = values[:, :LANES]
    plane = lax.div(lax.broadcasted_iota(jnp.int32, own.shape, 0), g.queries_per_plane)
    for p in range(1, planes):
        own = jnp.where(plane == p, values[:, p * LANES : (p + 1) * LANES], own)
    return own


# Jitted, so that a model's layers trace and lower it once.
@partial(jax.jit, static_argnames=("g", "blocks", "interpret"))
def attend(
    rows: jax.Array,  # [D, num_k_planes, queries_per_plane, 128]
    new_words: jax.Array,  # uint32[planes, D, 128]
    kv_pages: jax.Array,  # uint32[P, planes, page_words, 128]
    kv_lens: jax.Array,  # i32[S]
    new_pages: jax.Array,  # i32[D]
    page_table: jax.Array,  # i32[S * windows_per_seq, 1, 128]
    scalars: jax.Array,  # i32[2]: num_singles, first_page
    *,
    g: Geometry,
    blocks: DecodeBlocks,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """Returns the first num_singles rows' outputs, in the queries' shape (others: their queries), and the pages."""
    num_rows = rows.shape[0]
    groups = group_planes(g)
    tiles = rows.reshape(num_rows, groups.count, -1, LANES)
    tiles = jnp.pad(tiles, ((0, 0), (0, 0), (0, groups.rows - tiles.shape[2]), (0, 0)))
    tiles = tiles.reshape(num_rows, groups.count * groups.rows, LANES)
    block_words = blocks.kv_block // g.packing
    scratch = [
        pltpu.VMEM((num_rows + 1, *tiles.shape[1:]), tiles.dtype),
        pltpu.VMEM(new_words.shape, jnp.uint32),
        pltpu.VMEM((2, blocks.items_per_turn, g.num_planes, block_words, LANES), jnp.uint32),
        pltpu.VMEM((groups.count, 3, groups.rows, LANES), jnp.float32),
    ]
    scratch_bytes = sum(math.prod(s.shape) * jnp.dtype(s.dtype).itemsize for s in scratch)
    out, kv_pages = pl.pallas_call(
        partial(_kernel, g=g, blocks=blocks),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(1,),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 4,
            out_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 2,
            scratch_shapes=[
                *scratch,
                pltpu.SMEM((2, blocks.items_per_turn, 1, paging.WINDOW), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA,
                pltpu.SemaphoreType.DMA,
                pltpu.SemaphoreType.DMA,
            ],
        ),
        out_shape=(
            jax.ShapeDtypeStruct(tiles.shape, tiles.dtype),
            jax.ShapeDtypeStruct(kv_pages.shape, kv_pages.dtype),
        ),
        input_output_aliases={4: 0, 6: 1},
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=scratch_bytes + (16 << 20), disable_bounds_checks=True),
        interpret=interpret,
        name="paged_attention_decode",
    )(kv_lens, new_pages, scalars, page_table, tiles, new_words, kv_pages)
    out = out.reshape(num_rows, groups.count, groups.rows, LANES)
    out = out[:, :, : groups.planes * g.queries_per_plane]
    return out.reshape(rows.shape), kv_pages
