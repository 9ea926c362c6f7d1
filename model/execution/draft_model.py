"""Drafts from a small model with the same vocabulary.

A speculative step runs it inside its own program: first over the tokens that it has not seen, then once per draft. The
first pass of the drafts takes the last two tokens of a row: if the step before accepted all drafts, the draft model has
not read the last one of them. Steps without drafts do not run it.

Shape legend: `S` rows of the step (padded), `D` drafts of a row, `C` tokens of one pass over unseen tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from batcher.slots import SlotLayout
from model.execution import draft_pages, page_text
from model.execution.draft_pages import DraftPages
from model.execution.rows import StepRows, ragged_batch
from model.execution.step import forward
from model.network.llama import Llama
from pallas_kernels.api import PagedAttention
from pallas_kernels.spec import RaggedBatch

NO_TOKEN = -1  # in place of a draft: no token equals it

# (logits f32[S, V], the drafts before the place i32[S, D], the place i32[]) -> the drafts of the place, i32[S]
Draw = Callable[[jax.Array, jax.Array, jax.Array | int], jax.Array]


@dataclass(frozen=True, kw_only=True)
class DraftModel:
    """The draft model as the programs run it."""

    rebuild: Callable[[Any], Llama]  # the programs' weights -> the draft model
    attention: PagedAttention  # its pages have as many tokens as the model's
    pass_tokens: int  # C
    max_passes: int  # over unseen tokens, in one step; rows that need more have no drafts yet

    def propose(
        self,
        weights: Any,
        pages: DraftPages,
        text: jax.Array,
        rows: StepRows,
        num_rows: jax.Array,
        draw: Draw,
        most: int,
    ) -> tuple[jax.Array, DraftPages]:
        """The drafts of the rows i32[S, D], NO_TOKEN where there are none, and the pages with their K/V. These do not
        count as filled before `accept`.

        Args:
            text: i32[P, page_size], see `page_text`.
            rows: decodes; a row of n tokens has up to n - 1 drafts.
            num_rows: i32[], without padding.
            most: drafts of a row.
        """
        model, page_size = self.rebuild(weights), self.attention.spec.page_size
        num_drafts = jnp.diff(rows.starts) - 1
        pages = self._catch_up(model, pages, text, rows, num_drafts > 0)
        is_ready = (num_drafts > 0) & (draft_pages.lengths(pages.filled, rows, page_size) >= rows.past - 1)

        before = jnp.maximum(rows.past - 1, 0)
        page = jnp.take_along_axis(rows.state, (SlotLayout.PAGE_TABLE + before // page_size)[:, None], axis=1)[:, 0]
        previous = text.at[page, before % page_size].get(mode="clip")
        tokens = jnp.stack([previous, rows.state[:, SlotLayout.LAST_TOKEN]], axis=1)
        positions = jnp.where(is_ready[:, None], jnp.stack([before, rows.past], axis=1), jnp.arange(2))
        batch = self._batch(rows, is_ready, 2, rows.past + 1, num_rows)
        metadata = self.attention.make_metadata(batch, num_tokens=tokens.size, decode_only=False, few_queries=True)
        hidden, kv = self._forward(model, tokens.ravel(), positions.ravel(), pages.kv, metadata)
        drafts = jnp.full((tokens.shape[0], most), NO_TOKEN, jnp.int32)
        first = draw(model.logits(hidden[1::2]), drafts, 0)
        drafts = drafts.at[:, 0].set(jnp.where(is_ready, first, NO_TOKEN))

        def next_draft(place: jax.Array, carry: tuple[jax.Array, list[jax.Array]]) -> tuple[jax.Array, list[jax.Array]]:
            drafts, kv = carry
            goes_on = is_ready & (num_drafts > place)
            last = lax.dynamic_index_in_dim(drafts, place - 1, axis=1, keepdims=False)
            batch = self._batch(rows, goes_on, 1, rows.past + place + 1, num_rows)
            metadata = self.attention.make_metadata(batch, num_tokens=last.shape[0], decode_only=True)
            positions = jnp.where(goes_on, rows.past + place, 0)
            hidden, kv = self._forward(model, jnp.maximum(last, 0), positions, kv, metadata)
            drawn = jnp.where(goes_on, draw(model.logits(hidden), drafts, place), NO_TOKEN)
            return lax.dynamic_update_index_in_dim(drafts, drawn, place, axis=1), kv

        if most > 1:
            drafts, kv = lax.fori_loop(1, jnp.max(num_drafts), next_draft, (drafts, kv))  # as many as a row takes
        return drafts, DraftPages(kv=kv, filled=pages.filled)

    def accept(self, pages: DraftPages, rows: StepRows, drafts: jax.Array, num_accepted: jax.Array) -> DraftPages:
        """The pages after `propose`, with the K/V of the tokens that belong to the rows now.

        Args:
            drafts: i32[S, D], of `propose`.
            num_accepted: i32[S]. The K/V of a row's last accepted draft are missing if it was the last draft.
        """
        page_size, num_drafts = self.attention.spec.page_size, jnp.sum(drafts != NO_TOKEN, axis=1)
        length = rows.past + jnp.minimum(num_accepted + 1, num_drafts)
        positions = jnp.maximum(rows.past - 1, 0)[:, None] + jnp.arange(drafts.shape[1] + 1)
        table = SlotLayout.PAGE_TABLE + positions // page_size
        page = jnp.take_along_axis(rows.state, jnp.minimum(table, rows.state.shape[1] - 1), axis=1)
        is_filled = (positions < length[:, None]) & (num_drafts > 0)[:, None]
        page = jnp.where(is_filled, page, pages.filled.shape[0])
        return replace(pages, filled=draft_pages.fill(pages.filled, page, positions % page_size))

    def _catch_up(
        self, model: Llama, pages: DraftPages, text: jax.Array, rows: StepRows, wanted: jax.Array
    ) -> DraftPages:
        """Computes the tokens of the `wanted` rows, bool[S], that the draft model has not seen, all but the last."""
        page_size = self.attention.spec.page_size

        def unseen(length: jax.Array) -> jax.Array:
            return jnp.where(wanted, jnp.maximum(rows.past - 1 - length, 0), 0)

        def goes_on(carry: tuple[jax.Array, jax.Array, DraftPages]) -> jax.Array:
            number, length, _ = carry
            return (number < self.max_passes) & (unseen(length) > 0).any()

        def one_pass(carry: tuple[jax.Array, jax.Array, DraftPages]) -> tuple[jax.Array, jax.Array, DraftPages]:
            number, length, pages = carry
            left = unseen(length)
            count = jnp.clip(self.pass_tokens - (jnp.cumsum(left) - left), 0, left)
            part = _part(rows, length, count)
            index = jnp.arange(self.pass_tokens, dtype=jnp.int32)
            row = jnp.minimum(jnp.sum(index[:, None] >= part.starts[1:], axis=1, dtype=jnp.int32), count.shape[0] - 1)
            positions = jnp.where(index < part.starts[-1], part.past[row] + index - part.starts[row], 0)
            page, offset = page_text.places(part, positions, page_size=page_size, num_pages=text.shape[0])
            tokens = text.at[page, offset].get(mode="clip")
            batch = ragged_batch(part, jnp.stack([jnp.sum(count == 1), jnp.sum(count > 0)]), page_size)
            metadata = self.attention.make_metadata(batch, num_tokens=self.pass_tokens, decode_only=False)
            _, kv = self._forward(model, tokens, positions, pages.kv, metadata)
            filled = draft_pages.fill(pages.filled, page, offset)
            return number + 1, length + count, DraftPages(kv=kv, filled=filled)

        length = draft_pages.lengths(pages.filled, rows, page_size)
        return lax.while_loop(goes_on, one_pass, (jnp.int32(0), length, pages))[2]

    def _batch(
        self, rows: StepRows, is_active: jax.Array, q_len: int, kv_lens: jax.Array, num_rows: jax.Array
    ) -> RaggedBatch:
        """Rows of `q_len` tokens each. Those of rows that are not active go to the null page."""
        index = jnp.arange(rows.starts.shape[0], dtype=jnp.int32)
        lengths = jnp.where(is_active, kv_lens, jnp.where(index[:-1] < num_rows, q_len, 0))
        same = replace(
            rows,
            state=jnp.where(is_active[:, None], rows.state, 0),
            starts=q_len * jnp.minimum(index, num_rows),
            kv_lens=lengths,
        )
        num_singles = num_rows if q_len == 1 else jnp.zeros_like(num_rows)
        return ragged_batch(same, jnp.stack([num_singles, num_rows]), self.attention.spec.page_size)

    def _forward(
        self, model: Llama, tokens: jax.Array, positions: jax.Array, kv: list[jax.Array], metadata: Any
    ) -> tuple[jax.Array, list[jax.Array]]:
        return forward(model, tokens, positions, kv, [None] * len(kv), self.attention, metadata)


def _part(rows: StepRows, length: jax.Array, count: jax.Array) -> StepRows:
    """The next `count` tokens of each row after its first `length`, i32[S] each, as rows of a step: those of one token
    first, and those without a token last."""
    order = jnp.argsort(jnp.where(count == 1, 0, jnp.where(count > 1, 1, 2)), stable=True)
    return StepRows(
        slots=rows.slots[order],
        state=rows.state[order],
        starts=jnp.cumulative_sum(count[order], include_initial=True),
        past=length[order],
        kv_lens=jnp.where(count > 0, length + count, 0)[order],
        emits=jnp.zeros_like(rows.emits),
    )
