"""Appends the new K/V of rows of any length to their pages: copies of whole words from HBM to HBM.

`new_words` holds the new words of all rows, one row after the other, each token in its part of its word, as in the
pages. A row's first word may also hold older tokens, which are in the page: that word is merged in VMEM. `new_pages`
holds the destination pages in the same order. They are few, and are read from the page table once per step. (The decode
kernel appends its rows' tokens itself: it has their words in VMEM.)
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu import paging
from pallas_kernels.tpu.mixed_memory import Refs

_SPARE_WORDS = {1: 0, 2: 1, 4: 2}  # by tokens of a word: a row may begin and end in the middle of a word


def word_base(row: Any, query_start: Any, packing: int) -> Any:
    """The index of a row's first new word. A row of n tokens touches at most n // packing + _SPARE_WORDS words."""
    return query_start if packing == 1 else lax.div(query_start, packing) + _SPARE_WORDS[packing] * row


def num_word_slots(num_tokens: int, num_rows: int, packing: int) -> int:
    """Words that `num_tokens` new tokens of `num_rows` rows take at most."""
    return num_tokens // packing + _SPARE_WORDS[packing] * num_rows


def page_base(row: Any, query_start: Any, page_size: int) -> Any:
    """The index of a row's first new page. A row of n tokens touches at most n // page_size + 2 pages."""
    return lax.div(query_start, page_size) + 2 * row


def num_page_slots(num_tokens: int, num_rows: int, page_size: int) -> int:
    """Pages that `num_tokens` new tokens of `num_rows` rows lie in at most."""
    return num_tokens // page_size + 2 * num_rows


def append_rows(begin_row: Any, end_row: Any, refs: Refs, pages: paging.Pages) -> None:
    """Writes the new words of rows [begin_row, end_row) to their pages, and waits for all of them."""
    g = pages.geometry
    packing = g.kv_packing
    query_starts, new_words, sem = refs.query_starts, refs.new_words, refs.append_sem

    def append_row(row: Any, num_sent: Any) -> Any:
        query_start = query_starts[row]
        position = refs.kv_lens[row] - (query_starts[row + 1] - query_start)
        begin, end = lax.div(position, packing), paging.words_of(refs.kv_lens[row], packing)
        base = word_base(row, query_start, packing)
        shared = jnp.minimum(lax.rem(position, packing), 1)  # 1 if the first new token's word also holds older tokens
        first_page = page_base(row, query_start, g.page_size) - lax.div(position, g.page_size)

        @pl.when(shared > 0)
        def _() -> None:
            # The semaphore counts earlier rows' words, too: wait for those first.
            paging.wait_words(new_words, num_sent, sem)
            page = refs.new_pages[first_page + lax.div(position, g.page_size)]
            older = paging.older_tokens(position, packing)
            _merge_word(new_words.at[:, pl.ds(base, 1)], pages.words(page, begin, 1), older, refs.edge, sem)

        num_sent = jnp.where(shared > 0, 0, num_sent)
        first = begin + shared

        def send(index: Any, word: Any, size: Any) -> None:
            source = new_words.at[:, pl.ds(base + word - begin, size)]
            pltpu.make_async_copy(source, pages.words(refs.new_pages[first_page + index], word, size), sem).start()

        pages.for_each_run(first, end, send)
        return num_sent + end - first

    num_sent = lax.fori_loop(begin_row, end_row, append_row, jnp.int32(0))
    paging.wait_words(new_words, num_sent, sem)


def _merge_word(new: Any, in_page: Any, older: Any, edge: Any, sem: Any) -> None:
    """Merges the new tokens of the word `new` with those of the word `in_page` that are in the mask `older`."""
    loads = [pltpu.make_async_copy(new, edge.at[0], sem), pltpu.make_async_copy(in_page, edge.at[1], sem)]
    for load in loads:
        load.start()
    for load in loads:
        load.wait()
    edge[0] = edge[0] | (edge[1] & older)
    store = pltpu.make_async_copy(edge.at[0], in_page, sem)
    store.start()
    store.wait()
