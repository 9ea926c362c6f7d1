"""What both kernels share: moving live words between pages in HBM and blocks in VMEM, and the arithmetic of blocks.

A block is `kv_block` consecutive tokens of one sequence, all planes: `uint32[planes, kv_block / packing, 128]` in VMEM.
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

MASKED = -1e30  # a score that no query sees; finite, so that a wholly masked row makes no NaN


def words_of(tokens: Any, packing: int) -> Any:
    """Words that hold `tokens` tokens, counted from a word's beginning."""
    return lax.div(tokens + (packing - 1), packing) if packing > 1 else tokens


@dataclass(frozen=True, kw_only=True)
class Pages:
    """The pages of one layer, and the table that says which of them hold a sequence."""

    hbm: Any  # uint32[P, planes, page_words, 128] in HBM: the output ref, aliased to the input
    table: Any  # i32[S * pages_per_seq] in SMEM
    pages_per_seq: int
    first_page: Any  # i32: where this layer's pages begin
    geometry: Geometry

    def words(self, row: Any, word: Any, size: Any) -> Any:
        """`size` words of `row`'s sequence from word `word` on, all planes. They must lie in one page."""
        page = self.table[row * self.pages_per_seq + lax.div(word, self.geometry.page_words)]
        offset = lax.rem(word, self.geometry.page_words)
        return self.hbm.at[self.first_page + page, :, pl.ds(offset, size)]

    def for_each_run(self, begin: Any, end: Any, body: Any) -> None:
        """Calls `body(word, size)` for the runs of words of [begin, end) that lie in one page each, in order."""
        page_words = self.geometry.page_words
        first = lax.div(begin, page_words)

        def run(i: Any, carry: None) -> None:
            word = jnp.maximum(begin, (first + i) * page_words)
            body(word, jnp.minimum(end, (first + i + 1) * page_words) - word)

        num_runs = jnp.where(end > begin, lax.div(end + (page_words - 1), page_words) - first, 0)
        lax.fori_loop(0, num_runs, run, None)


def fetch(pages: Pages, row: Any, begin: Any, end: Any, block: Any, sem: Any) -> None:
    """Starts copies of words [begin, end) of `row` into `block`, word `begin` first. `end - begin` may be 0."""

    def start(word: Any, size: Any) -> None:
        source = pages.words(row, word, size)
        pltpu.make_async_copy(source, block.at[:, pl.ds(word - begin, size)], sem).start()

    pages.for_each_run(begin, end, start)


def wait_words(block: Any, num_words: Any, sem: Any) -> None:
    """Waits until copies of `num_words` words into (or out of) `block` have been signalled on `sem`."""

    @pl.when(num_words > 0)
    def _() -> None:
        # A copy engine counts bytes: one wait for the sum serves many copies.
        landed = block.at[:, pl.ds(0, num_words)]
        pltpu.make_async_copy(landed, landed, sem).wait()


def unpack(words: jax.Array, g: Geometry) -> jax.Array:
    """uint32[n, 128] -> dtype[n * packing, 128]: on the chip only a new name for the same registers."""
    return pltpu.bitcast(words, g.dtype)


def live_words_only(words: jax.Array, num_words: Any) -> jax.Array:
    """Zeros past `num_words`: what lies there may be anything, and 0 x NaN is NaN."""
    index = lax.broadcasted_iota(jnp.int32, words.shape, 0)
    return jnp.where(index < num_words, words, jnp.uint32(0))
