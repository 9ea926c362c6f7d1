"""Appends the new K/V of rows of any length to their pages.

The unit is the part of a row that one query block covers. Its tokens are copied from HBM to `stage` as the projection
made them, keys are rotated there, and tokens are packed into words: `words` has the page's words, beginning at any row.
From there whole words are copied to the pages. Parts of one row are cut at whole words: a word that two parts share is
written by the first of them. A row's first word may also hold older tokens, which are in the page: that word is merged.

The steps of a part run ahead of the attention over it, so their copies run while other parts are computed on:

    stage    starts the copies into `stage`             three query blocks ahead
    write    packs the words, starts their copies       two ahead
    wait     waits until the pages have them            before the first KV block of the query block is fetched

`new_pages` holds the destination pages of all rows, one row after the other. They are few, and are read from the page
table once per step. (The decode kernel appends its rows' tokens itself.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu import lanes, paging
from pallas_kernels.tpu.entries import QueryBlock, query_block_at
from pallas_kernels.tpu.layout import LANES, Geometry
from pallas_kernels.tpu.mixed_memory import Refs
from pallas_kernels.tpu.tiles import FewBlocks, MixedBlocks


def page_base(row: Any, query_start: Any, page_size: int) -> Any:
    """The index of a row's first new page. A row of n tokens touches at most n // page_size + 2 pages."""
    return lax.div(query_start, page_size) + 2 * row


def num_page_slots(num_tokens: int, num_rows: int, page_size: int) -> int:
    """Pages that `num_tokens` new tokens of `num_rows` rows lie in at most."""
    return num_tokens // page_size + 2 * num_rows


@dataclass(frozen=True, kw_only=True)
class _Part:
    """The new tokens of one query block."""

    block: QueryBlock
    begin: Any  # the first word that the part writes, in the sequence
    end: Any  # past its last word
    first_token: Any  # of word `begin`, in the step; before the row's first token if the word has older ones
    older: Any  # 1 if the first word also holds older tokens
    live: Any  # tokens of the sequence that its last word holds
    num_staged: Any  # tokens, from `block.start` on

    @property
    def num_words(self) -> Any:
        return self.end - self.begin


def _part(block: QueryBlock, g: Geometry) -> _Part:
    packing = g.kv_packing
    first = block.position + block.skip  # the position of its first new token
    begin = jnp.where(block.index == 0, lax.div(first, packing), paging.words_of(first, packing))
    end = paging.words_of(block.position + block.num_q, packing)
    stop = jnp.minimum(block.row_end - block.start + block.position, end * packing)  # position past its last token
    num_staged = paging.whole_tiles(stop - block.position, g.token_tile)
    return _Part(
        block=block,
        begin=begin,
        end=end,
        first_token=block.start - block.position + begin * packing,
        older=jnp.where(block.index == 0, jnp.minimum(lax.rem(first, packing), 1), 0),
        live=stop - (end - 1) * packing,
        num_staged=num_staged,
    )


@dataclass(frozen=True, kw_only=True)
class Appender:
    """The three steps, for the query blocks of rows before `end_row`. Blocks past them are left out."""

    refs: Refs
    g: Geometry
    blocks: MixedBlocks | FewBlocks
    end_row: Any
    pages: paging.Pages

    def stage(self, row: Any, index: Any) -> None:
        """Starts the copies of a query block's new tokens."""

        @pl.when(row < self.end_row)
        def _() -> None:
            part = self._part(row, index)
            for copy in self._stage_copies(part):
                copy.start()
            self._if_shared(part, lambda copy: copy.start())

    def write(self, row: Any, index: Any, half: Any) -> None:
        """Packs the words of a query block that is staged, and starts their copies to the pages."""

        @pl.when(row < self.end_row)
        def _() -> None:
            refs, g = self.refs, self.g
            part = self._part(row, index)
            for copy in self._stage_copies(part):
                copy.wait()
            offset = g.pack_tile + part.first_token - part.block.start  # in `stage`
            self._pack(part, half, lax.rem(offset, g.kv_packing))
            first_row = lax.div(offset, g.kv_packing)
            last = refs.words.at[half, :, pl.ds(first_row + part.num_words - 1, 1)]

            @pl.when(part.live < g.kv_packing)
            def _() -> None:
                last[...] = last[...] & paging.older_tokens(part.live, g.kv_packing)

            def merge(load: Any) -> None:
                load.wait()
                word = refs.words.at[half, :, pl.ds(first_row, 1)]
                older = paging.older_tokens(part.block.position + part.block.skip, g.kv_packing)
                word[...] = (word[...] & ~older) | (refs.edge[...] & older)

            self._if_shared(part, merge)
            first_page = self._first_page(row)

            def send(page: Any, word: Any, size: Any) -> None:
                source = refs.words.at[half, :, pl.ds(first_row + word - part.begin, size)]
                target = self.pages.words(refs.new_pages[first_page + page], word, size)
                pltpu.make_async_copy(source, target, refs.append_sems.at[half]).start()

            self.pages.for_each_run(part.begin, part.end, send)

    def wait(self, row: Any, index: Any, half: Any) -> None:
        """Waits until the pages have the new tokens of a query block, which must be of a row before `end_row`."""
        paging.wait_words(self.refs.words.at[half], self._part(row, index).num_words, self.refs.append_sems.at[half])

    def _part(self, row: Any, index: Any) -> _Part:
        return _part(query_block_at(row, index, self.refs.kv_lens, self.refs.query_starts, self.g, self.blocks), self.g)

    def _first_page(self, row: Any) -> Any:
        """What is to be added to the index of the sequence's page to get its index in `new_pages`."""
        begin = self.refs.query_starts[row]
        position = self.refs.kv_lens[row] - (self.refs.query_starts[row + 1] - begin)
        return page_base(row, begin, self.g.page_size) - lax.div(position, self.g.page_size)

    def _stage_copies(self, part: _Part) -> list[Any]:
        refs = self.refs
        source, target = pl.ds(part.block.start, part.num_staged), pl.ds(self.g.pack_tile, part.num_staged)
        columns = pl.ds(refs.kv_column, self.g.kv_columns)
        copies = [pltpu.make_async_copy(refs.new_kv.at[source, columns], refs.stage.at[target], refs.stage_sem)]
        if refs.rotation is not None:
            copies.append(pltpu.make_async_copy(refs.rotation.at[source], refs.kv_rotation.at[target], refs.stage_sem))
        return copies

    def _if_shared(self, part: _Part, body: Any) -> None:
        """Calls `body` with the copy of the part's first word from its page, if that holds older tokens."""
        if self.g.kv_packing == 1:
            return

        @pl.when(part.older > 0)
        def _() -> None:
            index = self._first_page(part.block.row) + lax.div(part.begin, self.g.page_words)
            in_page = self.pages.words(self.refs.new_pages[index], part.begin, 1)
            body(pltpu.make_async_copy(in_page, self.refs.edge, self.refs.edge_sem))

    def _pack(self, part: _Part, half: Any, shift: Any) -> None:
        """The tokens in `stage` as words of `kv_packing`, the first in part 0 being token `shift`."""
        refs, g = self.refs, self.g
        tile, tile_words = g.pack_tile, g.pack_tile // g.kv_packing
        bits = 32 // g.kv_packing
        scales = lanes.scales_of_planes(refs.kv_scales, range(g.num_planes), g)

        def pack(i: Any, carry: None) -> None:
            tokens, words = (pl.ds(pl.multiple_of(i * size, size), size) for size in (tile, tile_words))
            for p in range(g.num_planes):
                kv = refs.stage[tokens, p * LANES : (p + 1) * LANES]
                if refs.rotation is not None and p < g.num_k_planes:
                    kv = lanes.rotate(kv, refs.kv_rotation[tokens], g)
                # On the chip the bitcast moves nothing: the registers stay the same.
                refs.words[half, p, words] = pltpu.bitcast(lanes.stored(kv, scales[p], g), jnp.uint32)

        def shift_words(i: Any, carry: None) -> None:
            low, high = (shift * bits).astype(jnp.uint32), ((g.kv_packing - shift) * bits).astype(jnp.uint32)
            for p in range(g.num_planes):
                words, after = (refs.words[half, p, pl.ds(i * tile_words + n, tile_words)] for n in range(2))
                refs.words[half, p, pl.ds(i * tile_words, tile_words)] = (words >> low) | (after << high)

        num_tiles = 1 + lax.div(part.num_staged + (tile - 1), tile)  # the first is of tokens before the staged ones
        lax.fori_loop(1, num_tiles, pack, None)
        if g.kv_packing > 1:

            @pl.when(shift > 0)
            def _() -> None:
                lax.fori_loop(0, num_tiles, shift_words, None)
