"""The part that both kernels share: copies of live words between pages in HBM and blocks in VMEM, and block products.

A block is `kv_block` consecutive tokens of one sequence, all planes: `uint32[planes, block_words, 128]` in VMEM, where
`block_words` is `kv_block / kv_packing`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu.layout import Geometry

SUBLANES = 8  # rows of a register
WINDOW = 128  # entries of the page table fetched at a time: the lanes of one register
MASKED = -1e30  # the score of a masked token; finite, so a fully masked row gives no NaN


def words_of(tokens: Any, packing: int) -> Any:
    """Words that hold `tokens` tokens, counted from a word's beginning."""
    return lax.div(tokens + (packing - 1), packing) if packing > 1 else tokens


def whole_tiles(tokens: Any, tile: int) -> Any:
    """`tokens` rounded up to whole tiles, so that their rows can be copied."""
    return pl.multiple_of(lax.div(tokens + (tile - 1), tile) * tile, tile)


def windows_of_table(page_table: jax.Array) -> jax.Array:
    """i32[S, pages_per_seq] -> i32[S * windows_per_seq, 1, 128]: the table in windows, fetched one by one.

    The table stays in HBM: scalar memory has 1 MiB, and the table of 512 sequences of 128k tokens takes 16 MiB with
    pages of 16.
    """
    return jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % WINDOW))).reshape(-1, 1, WINDOW)


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Copies of parts of the page table, with the ids of a block's pages, from HBM to scalar memory.

    Two halves: a block's pages are needed when its copies are started, one step before the block is computed on. While
    block i is computed on, the pages of block i + 1 and the window of block i + 2 are fetched.
    """

    table: Any  # i32[S * windows_per_seq, 1, 128] in HBM
    smem: Any  # i32[2, blocks of one step, 1, 128] in SMEM
    sems: Any  # DMA[2]
    per_seq: int  # windows of one sequence

    def copy(self, row: Any, index: Any, half: Any, slot: int) -> Any:
        """The copy of the window that names page `index` of `row`'s sequence."""
        source = self.table.at[row * self.per_seq + lax.div(index, WINDOW)]
        return pltpu.make_async_copy(source, self.smem.at[half, slot], self.sems.at[half])

    def page(self, half: Any, slot: int, index: Any) -> Any:
        """The id of the sequence's page `index`, which must be in the window in `slot`."""
        return self.smem[half, slot, 0, lax.rem(index, WINDOW)]


@dataclass(frozen=True, kw_only=True)
class Pages:
    """The pages of one layer."""

    hbm: Any  # uint32[P, planes, page_words, 128] in HBM: the output ref, aliased to the input
    first_page: Any  # i32: where this layer's pages begin
    geometry: Geometry

    def words(self, page: Any, word: Any, size: Any) -> Any:
        """`size` words of `page` from the sequence's word `word` on, all planes."""
        offset = lax.rem(word, self.geometry.page_words)
        return self.hbm.at[self.first_page + page, :, pl.ds(offset, size)]

    def for_each_run(self, begin: Any, end: Any, body: Any) -> None:
        """Calls `body(index, word, size)` for each part of the words [begin, end) that lies in one page, in order. The
        page is the sequence's page `index`; `word` counts from the sequence's beginning."""
        page_words = self.geometry.page_words
        first = lax.div(begin, page_words)

        def run(i: Any, carry: None) -> None:
            word = jnp.maximum(begin, (first + i) * page_words)
            body(first + i, word, jnp.minimum(end, (first + i + 1) * page_words) - word)

        num_runs = jnp.where(end > begin, lax.div(end + (page_words - 1), page_words) - first, 0)
        lax.fori_loop(0, num_runs, run, None)


def fetch(pages: Pages, page_of: Any, begin: Any, end: Any, block: Any, sem: Any) -> None:
    """Starts copies of words [begin, end) of a sequence into `block`, word `begin` first. `end - begin` may be 0.

    `page_of(index)` is the id of the sequence's page `index`."""

    def start(index: Any, word: Any, size: Any) -> None:
        source = pages.words(page_of(index), word, size)
        pltpu.make_async_copy(source, block.at[:, pl.ds(word - begin, size)], sem).start()

    pages.for_each_run(begin, end, start)


def wait_words(block: Any, num_words: Any, sem: Any) -> None:
    """Waits until copies of `num_words` words into (or out of) `block` have been signalled on `sem`."""

    @pl.when(num_words > 0)
    def _() -> None:
        # Copies are counted by their size: one wait for the sum covers many copies.
        landed = block.at[:, pl.ds(0, num_words)]
        pltpu.make_async_copy(landed, landed, sem).wait()


def wait_rows(tokens: Any, num_rows: Any, sem: Any) -> None:
    """Waits until a copy of `num_rows` rows, which are whole tiles, into (or out of) `tokens` has been signalled."""

    @pl.when(num_rows > 0)
    def _() -> None:
        landed = tokens.at[pl.ds(0, pl.multiple_of(num_rows, SUBLANES))]
        pltpu.make_async_copy(landed, landed, sem).wait()


def unpack_kv(words: jax.Array, g: Geometry) -> jax.Array:
    """uint32[n, 128] -> dtype[n * kv_packing, 128]: K or V for products with the queries.

    On the chip the bitcast moves nothing: the registers stay the same. 8-bit values are converted, exactly.
    """
    return pltpu.bitcast(words, g.kv_dtype).astype(g.dtype)


def older_tokens(position: Any, packing: int) -> Any:
    """A mask of the bits of older tokens in the word of `position`."""
    bits = 32 // packing
    return (jnp.uint32(1) << (lax.rem(position, packing) * bits).astype(jnp.uint32)) - jnp.uint32(1)


def live_words_only(words: jax.Array, num_words: Any) -> jax.Array:
    """`words` with zeros past `num_words`: the words there may hold anything, and 0 x NaN is NaN."""
    index = lax.broadcasted_iota(jnp.int32, words.shape, 0)
    return jnp.where(index < num_words, words, jnp.uint32(0))


def product(a: jax.Array, b: jax.Array, contract_b: int, g: Geometry) -> jax.Array:
    """f32: the last axis of `a` against axis `contract_b` of `b`."""
    precision = lax.Precision.HIGHEST if g.dtype == jnp.float32 else None
    return lax.dot_general(
        a, b, (((1,), (contract_b,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
