"""The decode kernel: rows of one token each, several sequences at a time.

The work is a list of items. An item is one block of `kv_block` tokens of one sequence. The items of a long sequence are
consecutive. The list is not stored: a cursor (row, block) steps through it. One turn of the loop takes `items_per_turn`
consecutive items of any sequences, so sequences of different lengths never wait for each other.

    turn i:   wait for the windows of the page table that turn i+1's items need, start the copies of its items into the
                  other half of `kv_blocks` (HBM -> VMEM, live words only), and of turn i+2's windows (HBM -> SMEM)
              wait for the copies of turn i's items
              last block of a sequence: merge the new token into its word, start that word's write-back (VMEM -> HBM)
              for every item, in straight-line code so that the scheduler interleaves them:
                  scores = q K^T, masked; softmax over this block alone; its sum and P V; fold into the running state
                  last block of a sequence: divide, store the row's output over its query

An example: rows of 600, 100 and 1030 tokens, including the new ones; blocks of 512 tokens, two items per turn.

    turn 0:   row 0, tokens 0-511     row 0, tokens 512-599, its last: output
    turn 1:   row 1, tokens 0-99      row 2, tokens 0-511         row 1 needs one block only: output
    turn 2:   row 2, tokens 512-1023  row 2, tokens 1024-1029     output; the running state went from turn to turn

While turn 0 computes, turn 1's copies run: for row 1, they are 99 cached tokens in 50 words. In VMEM its new token,
number 99, is then merged into the last word, next to token 98. Only this word is written back to the row's page.

If no row has more than `SHORT_BLOCK` tokens, an item has `SHORT_BLOCK` tokens instead of `kv_block`. The kernel has the
loop twice for this.

The semaphores:
- `kv_sems[half]`    copies into that half of `kv_blocks`; waited for at the beginning of the turn that computes on it.
                     The other half is refilled only after the turn that read it has ended.
- `window_sems[half]` the page table's windows of the turn that fills that half of `kv_blocks`: waited for just before.
- `load_sem`         queries, new K/V and rotations of all rows, once, before the first turn.
- `append_sem`       the write-backs, all at once, after the last turn: their source `new_words` is never reused. A
                     semaphore counts granules of 32 bytes in 32 bits. 1,024 rows of Llama 3 8B are 2^18 granules, as
                     many as the queries of these rows, which are one copy.
- `store_sem`        the outputs, once, after the last turn.

A token of the step is a row, and its heads are columns. Before the first turn, while its copies run, the queries of
each token are rotated and gathered into `rows`, with one head below the other (`decode_rows`). After the last turn, the
outputs are moved back to columns.

Planes are grouped so that their query rows fill one bf16 register tile (16 rows). The queries of a group form a block
diagonal, [rows, planes x 128] with zeros elsewhere, so one product computes the scores of all its heads. In decode the
matrix unit spends its time on loading K and V, so multiplying zeros costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu import paging
from pallas_kernels.tpu.decode_memory import (
    SHORT_BLOCK,
    DecodeBlocks,
    Groups,
    Operands,
    Refs,
    group_planes,
    max_rows,
    other_scratch,
    vmem_bytes,
    vmem_scratch,
)
from pallas_kernels.tpu.decode_rows import gather_rows, pack_new_tokens, scatter_rows
from pallas_kernels.tpu.layout import LANES, Geometry


@dataclass(frozen=True, kw_only=True)
class _Body:
    """The kernel. An item is (row, block of the row). Rows from `num_singles` on do not exist."""

    refs: Refs
    g: Geometry
    blocks: DecodeBlocks
    num_singles: Any
    pages: paging.Pages
    windows: paging.Windows

    @classmethod
    def of(cls, refs: Refs, g: Geometry, blocks: DecodeBlocks) -> _Body:
        num_singles, first_page = refs.scalars[0], refs.scalars[1]
        return cls(
            refs=refs,
            g=g,
            blocks=blocks,
            num_singles=num_singles,
            pages=paging.Pages(hbm=refs.pages, first_page=first_page, geometry=g),
            windows=paging.Windows(
                table=refs.page_table,
                smem=refs.table_windows,
                sems=refs.window_sems,
                per_seq=refs.page_table.shape[0] // refs.kv_lens.shape[0],
            ),
        )

    @property
    def block_words(self) -> int:
        return self.blocks.kv_block // self.g.kv_packing

    @property
    def no_row(self) -> int:
        """The index in `refs.rows` for items that belong to no row."""
        return self.refs.rows.shape[0] - 1

    def run(self) -> None:
        refs = self.refs
        self.in_class(_Body.begin)
        num_loaded = paging.whole_tiles(self.num_singles, self.g.token_tile)
        live = pl.ds(0, num_loaded)
        sources = [
            (refs.queries.at[live, pl.ds(0, self.g.query_columns)], refs.tokens),
            (refs.new_kv.at[live, pl.ds(refs.kv_column, self.g.kv_columns)], refs.new_tokens),
        ]
        if refs.rotation is not None:
            sources.append((refs.rotation.at[live], refs.rotations))
        loads = [pltpu.make_async_copy(source, target.at[live], refs.load_sem) for source, target in sources]
        for load in loads:
            load.start()
        for load in loads:
            load.wait()
        pack_new_tokens(refs, self.num_singles, self.g)
        gather_rows(refs, self.num_singles, self.g)
        self.in_class(_Body.turns)
        scatter_rows(refs, self.num_singles, self.g)
        paging.wait_words(refs.new_words, self.num_singles, refs.append_sem)

    def in_class(self, method: Callable[[_Body], None]) -> None:
        """Calls `method` with the block size for the longest row. Short rows would fill little of a long block."""
        if self.blocks.kv_block <= SHORT_BLOCK:
            method(self)
            return
        short = replace(self, blocks=replace(self.blocks, kv_block=SHORT_BLOCK))
        is_short = self.refs.scalars[2] <= SHORT_BLOCK
        pl.when(is_short)(lambda: method(short))
        pl.when(jnp.logical_not(is_short))(lambda: method(self))

    def begin(self) -> None:
        first, after = self.items_from(0, 0)
        self.for_each_window(first, 0, lambda copy: copy.start())
        self.start_fetching(first, self.items_from(*after)[0], 0)

    def turns(self) -> None:
        start = (jnp.int32(0), jnp.int32(0), jnp.int32(0))
        lax.while_loop(lambda carry: carry[0] < self.num_singles, self.turn, start)

    def kv_block(self, half: Any, i: int) -> Any:
        return self.refs.kv_blocks.at[half, i, :, pl.ds(0, self.block_words)]

    def store(self) -> None:
        """Stores the outputs, and zeros after them, so that the rows of other tokens are defined."""
        refs, tile = self.refs, self.g.token_tile
        zeros = jnp.zeros((tile, refs.tokens.shape[1]), refs.tokens.dtype)

        def zero(i: Any, carry: None) -> None:
            refs.tokens[pl.ds(pl.multiple_of(i * tile, tile), tile)] = zeros

        lax.fori_loop(lax.div(self.num_singles + (tile - 1), tile), refs.tokens.shape[0] // tile, zero, None)
        stored = pl.ds(0, min(refs.tokens.shape[0], refs.out.shape[0]))
        store = pltpu.make_async_copy(refs.tokens.at[stored], refs.out.at[stored], refs.store_sem)
        store.start()
        store.wait()

    def turn(self, carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        row, block, half = carry
        items, after = self.items_from(row, block)
        next_items, after_next = self.items_from(*after)
        self.start_fetching(next_items, self.items_from(*after_next)[0], 1 - half)
        self.wait_for(items, half)
        for i, item in enumerate(items):
            self.append(*item, self.kv_block(half, i))
        for i, (row, block) in enumerate(items):
            valid = row < self.num_singles
            live = jnp.where(valid, self.kv_len_of(row) - block * self.blocks.kv_block, 0)
            _attend(
                self.kv_block(half, i),
                self.refs.rows.at[jnp.where(valid, row, self.no_row)],
                self.refs.state,
                live=live,
                is_first=block == 0,
                is_last=live <= self.blocks.kv_block,
                g=self.g,
            )
        return *after, 1 - half

    def kv_len_of(self, row: Any) -> Any:
        return self.refs.kv_lens[jnp.minimum(row, self.refs.new_pages.shape[0] - 1)]

    def items_from(self, row: Any, block: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, Any]]:
        """The items of a turn that begins with item (row, block), and the first item of the next turn."""
        items = []
        for _ in range(self.blocks.items_per_turn):
            items.append((row, block))
            ended = (block + 1) * self.blocks.kv_block >= self.kv_len_of(row)
            row, block = jnp.where(ended, row + 1, row), jnp.where(ended, 0, block + 1)
        return items, (row, block)

    def cached_words(self, row: Any, block: Any) -> tuple[Any, Any]:
        """The range of the block's words that are already in pages. The new token is not."""
        begin = block * self.block_words
        cached = jnp.where(row < self.num_singles, self.kv_len_of(row) - 1, 0)
        return begin, jnp.clip(paging.words_of(cached, self.g.kv_packing), begin, begin + self.block_words)

    def for_each_window(self, items: list[tuple[Any, Any]], half: Any, body: Any) -> None:
        for i, (row, block) in enumerate(items):

            @pl.when(row < self.num_singles)
            def _(i: int = i, row: Any = row, block: Any = block) -> None:
                first_page = lax.div(block * self.blocks.kv_block, self.g.page_size)
                body(self.windows.copy(row, first_page, half, i))

    def start_fetching(self, items: list[tuple[Any, Any]], following: list[tuple[Any, Any]], half: Any) -> None:
        """Waits for the windows of `items`, starts the copies of `items`, and starts the copies of the windows of
        `following`."""
        self.for_each_window(items, half, lambda copy: copy.wait())
        for i, (row, block) in enumerate(items):
            begin, end = self.cached_words(row, block)
            page_of = partial(self.windows.page, half, i)
            kv_block, sem = self.kv_block(half, i), self.refs.kv_sems.at[half]
            paging.fetch(self.pages, page_of, begin, end, kv_block, sem)
        self.for_each_window(following, 1 - half, lambda copy: copy.start())

    def wait_for(self, items: list[tuple[Any, Any]], half: Any) -> None:
        for i, (row, block) in enumerate(items):
            begin, end = self.cached_words(row, block)
            paging.wait_words(self.kv_block(half, i), end - begin, self.refs.kv_sems.at[half])

    def append(self, row: Any, block: Any, kv: Any) -> None:
        """Merges the row's new token into the block, if this is the row's last block, and starts the write-back of the
        token's word."""
        refs, g = self.refs, self.g
        position = self.kv_len_of(row) - 1
        word = lax.div(position, g.kv_packing)

        @pl.when((row < self.num_singles) & (word < (block + 1) * self.block_words))
        def _() -> None:
            in_block = pl.ds(word - block * self.block_words, 1)
            merged = refs.token_pairs[:, pl.ds(lax.div(row, g.kv_packing), 1)]
            if g.kv_packing > 1:  # keeps only the row's token, and the older tokens of the word
                bits = 32 // g.kv_packing
                from_bit, to_bit = (lax.rem(i, g.kv_packing).astype(jnp.uint32) * bits for i in (row, position))
                token = (merged >> from_bit) & jnp.uint32((1 << bits) - 1)
                merged = (token << to_bit) | (kv[:, in_block] & paging.older_tokens(position, g.kv_packing))
            kv[:, in_block] = merged
            refs.new_words[:, pl.ds(row, 1)] = merged
            target = self.pages.words(refs.new_pages[row], word, 1)
            pltpu.make_async_copy(refs.new_words.at[:, pl.ds(row, 1)], target, refs.append_sem).start()


def _kernel(*refs: Any, g: Geometry, blocks: DecodeBlocks, kv_column: int, absent: tuple[str, ...]) -> None:
    names = [field.name for field in fields(Refs) if field.name not in ("kv_column", *absent)]
    num_inputs = names.index("out")  # then the pages, which are also an output
    given = dict(zip(names, refs[:num_inputs] + refs[num_inputs + 1 :], strict=True))
    body = _Body.of(Refs(kv_column=kv_column, **dict.fromkeys(absent), **given), g, blocks)
    pl.when(body.num_singles > 0)(body.run)
    body.store()


def _attend(
    kv: Any,  # uint32[planes, block_words, 128]
    row: Any,  # [rows, 128]: this row's queries, and its output after its last block
    state: Any,  # f32[groups, 3, group_rows, 128]
    *,
    live: Any,  # tokens of the block that the query sees; a number past the block's end means all of them
    is_first: Any,
    is_last: Any,
    g: Geometry,
) -> None:
    groups = group_planes(g)
    live_words = paging.words_of(live, g.kv_packing)
    for i in range(groups.count):
        planes = range(i * groups.planes, (i + 1) * groups.planes)
        tile = pl.ds(i * groups.rows, groups.rows)
        q = row[tile]
        k = jnp.concatenate([paging.unpack_kv(kv[p], g) for p in planes], axis=1)
        # V past the live words may be NaN, and 0 x NaN is NaN, so it is set to zero.
        v = jnp.concatenate(
            [paging.unpack_kv(paging.live_words_only(kv[g.v_plane(p)], live_words), g) for p in planes], axis=1
        )
        scores = paging.product(_spread(q, groups, g), k, 1, g) * (g.scale * math.log2(math.e))
        token = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        scores = jnp.where(token < live, scores, paging.MASKED)
        top = jnp.max(scores, axis=1, keepdims=True)
        weights = jnp.exp2(scores - top)
        total = jnp.sum(weights, axis=1, keepdims=True)
        values = _gather(paging.product(weights.astype(g.dtype), v, 0, g), groups)

        old_top = jnp.where(is_first, paging.MASKED, state[i, 0])
        new_top = jnp.maximum(old_top, top)
        keep, add = jnp.exp2(old_top - new_top), jnp.exp2(top - new_top)
        new_total = jnp.where(is_first, 0.0, state[i, 1]) * keep + total * add
        new_values = jnp.where(is_first, 0.0, state[i, 2]) * keep + values * add
        state[i, 0], state[i, 1], state[i, 2] = new_top, new_total, new_values
        row[tile] = jnp.where(is_last, (new_values / new_total).astype(q.dtype), q)


def _plane_of_rows(shape: tuple[int, ...], groups: Groups) -> jax.Array:
    """The index of each row's plane within its group. Rows of no head have an index past the group's planes."""
    return lax.div(lax.rem(lax.broadcasted_iota(jnp.int32, shape, 0), groups.part_rows), groups.plane_rows)


def _spread(q: jax.Array, groups: Groups, g: Geometry) -> jax.Array:
    """[rows, 128] -> [rows, planes * 128]: in the lanes of a plane, the plane's rows keep their values, and others are
    zero."""
    plane = _plane_of_rows(q.shape, groups)
    q = q.astype(jnp.float32)
    return jnp.concatenate([jnp.where(plane == p, q, 0.0).astype(g.dtype) for p in range(groups.planes)], axis=1)


def _gather(values: jax.Array, groups: Groups) -> jax.Array:
    """[rows, planes * 128] -> [rows, 128]: each row keeps the lanes of its own plane."""
    own = values[:, :LANES]
    plane = _plane_of_rows(own.shape, groups)
    for p in range(1, groups.planes):
        own = jnp.where(plane == p, values[:, p * LANES : (p + 1) * LANES], own)
    return own


# Jitted, so that a model's layers trace and lower it once.
@partial(jax.jit, static_argnames=("g", "kv_column", "blocks", "interpret"))
def attend(
    operands: Operands, *, g: Geometry, kv_column: int, blocks: DecodeBlocks, interpret: Any
) -> tuple[jax.Array, jax.Array]:
    """Attends the rows of one token. Returns the outputs [T, query_columns] and the pages. The outputs of other tokens
    are zeros up to the most single-token rows of the program, and undefined after that."""
    o = operands
    absent = tuple(name for name in ("kv_scales", "rotation") if getattr(o, name) is None)
    scalars = [o.kv_lens, o.new_pages, o.scalars] + ([] if o.kv_scales is None else [o.kv_scales])
    inputs = [o.page_table, o.queries, o.new_kv] + ([] if o.rotation is None else [o.rotation])
    rows = max_rows(g, o.new_pages.shape[0])
    return pl.pallas_call(
        partial(_kernel, g=g, blocks=blocks, kv_column=kv_column, absent=absent),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(1,),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * (len(inputs) + 1),
            out_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 2,
            scratch_shapes=[*vmem_scratch(g, blocks, rows), *other_scratch(blocks)],
        ),
        out_shape=(
            jax.ShapeDtypeStruct((o.queries.shape[0], g.query_columns), g.dtype),
            jax.ShapeDtypeStruct(o.kv_pages.shape, o.kv_pages.dtype),
        ),
        input_output_aliases={len(scalars) + len(inputs): 1},
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=vmem_bytes(g, blocks, rows), disable_bounds_checks=True),
        interpret=interpret,
        name="paged_attention_decode",
    )(*scalars, *inputs, o.kv_pages)
