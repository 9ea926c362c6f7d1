"""Drafts from a separate network: a small model, or a head on the model's hidden states.

A speculative step runs the network inside its own program: first over the tokens that the network has not read, then
once per draft. Steps without drafts do not run it. The network has its own K/V (`draft_pages`) for the positions that
it has read. The K/V of its own drafts come after these, and are read only within the step.

The first pass that drafts takes the last few positions of a row, its *window*. A step may leave these unread.
`draft_networks` defines what each kind of network reads at a position.

Shape legend: `S` rows of the step (padded), `D` drafts of a row, `W` positions of the window, `C` tokens of one pass
over unread tokens, `E` width of the features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from batcher.slots import SlotLayout
from model.execution import draft_pages, page_text
from model.execution.draft_pages import DraftPages
from model.execution.rows import StepRows, ragged_batch, row_of_tokens
from model.network.eagle import DraftVocabulary
from pallas_kernels.api import PagedAttention
from pallas_kernels.spec import RaggedBatch

NO_TOKEN = -1  # marks a missing draft; no token equals it


# Draws the drafts of a place, i32[S] tokens of the model: (logits f32[S, V], or f32[S, B] of the tokens in the
# vocabulary, the vocabulary, the drafts before the place i32[S, D], the place).
Draw = Callable[[jax.Array, DraftVocabulary | None, jax.Array, jax.Array | int], jax.Array]


@dataclass(frozen=True, kw_only=True)
class Network:
    """A network that drafts, with its weights."""

    # (tokens i32[T], positions i32[T], features [T, E] if it reads them, K/V pages, metadata) -> (its hidden states
    # [T, E], the pages with the K/V of the positions)
    run: Callable[[jax.Array, jax.Array, jax.Array | None, list[jax.Array], Any], tuple[jax.Array, list[jax.Array]]]
    logits: Callable[[jax.Array], jax.Array]  # its hidden states -> logits of the tokens in its vocabulary
    vocabulary: DraftVocabulary | None = None  # the tokens that it drafts; None: all tokens of the model


@dataclass(frozen=True, kw_only=True)
class Drafter(ABC):
    """A network that drafts, as the programs run it."""

    attention: PagedAttention  # its pages have as many tokens as the model's
    pass_tokens: int  # C
    max_passes: int  # most passes over unread tokens in a step; rows that need more have no drafts yet

    ahead: ClassVar[int]  # at position p, the network reads the token at p + ahead
    reads_features: ClassVar[bool]  # it also reads the model's features at p, and its own hidden states in their place

    @property
    def taps(self) -> tuple[int, ...]:
        """The layers of the model whose inputs make up the features (`taps` of `Llama.run`)."""
        return ()

    @abstractmethod
    def network(self, weights: Any) -> Network:
        """The network, from the programs' weights."""

    @abstractmethod
    def window(self, most: int) -> int:
        """W, the number of positions in the window, for steps with up to `most` drafts a row."""

    @abstractmethod
    def read_of_drafts(self, num_accepted: jax.Array, num_drafts: jax.Array) -> jax.Array:
        """The number i32[S] of drafts that the network has read after a step. The step had `num_drafts` i32[S] and
        accepted `num_accepted` i32[S]."""

    def features(self, weights: Any, hidden: jax.Array, tapped: Sequence[jax.Array]) -> jax.Array | None:
        """The features [T, E] of the model that the network reads at each token of a step; None: it reads none.

        Args:
            hidden, tapped: the results of `Llama.run`.
        """
        return None

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
        """The drafts i32[S, D] of the rows, and the pages with their K/V. Missing drafts are NO_TOKEN. The K/V do not
        count as read before `accept`.

        Args:
            text: the tokens of the pages, i32[P, page_size] (`page_text`).
            rows: decode rows; a row of n tokens has up to n - 1 drafts.
            num_rows: i32[], the number of rows without padding.
            most: the most drafts of a row.
        """
        network, window, end = self.network(weights), self.window(most), self._end(rows)
        page_size = self.attention.spec.page_size
        num_drafts = jnp.diff(rows.starts) - 1
        pages = self._catch_up(network, pages, text, rows, (num_drafts > 0) & (end >= window), end - window)
        is_ready = (num_drafts > 0) & (end >= window)
        is_ready &= draft_pages.lengths(pages.filled, rows, page_size) >= end - window

        place = jnp.arange(window, dtype=jnp.int32)
        positions = jnp.where(is_ready[:, None], (end - window)[:, None] + place, place)  # i32[S, W]
        tokens = _tokens_at(text, rows, positions + self.ahead)
        features = None
        if pages.features is not None:
            features = pages.features.at[_place_of(rows, positions, page_size)].get(mode="clip")
            features = features.reshape(positions.size, -1)
        batch = self._batch(rows, is_ready, window, end, num_rows)
        metadata = self.attention.make_metadata(batch, num_tokens=tokens.size, decode_only=False, spec_decode=True)
        hidden, kv = network.run(tokens.ravel(), positions.ravel(), features, pages.kv, metadata)
        hidden = hidden[window - 1 :: window]  # [S, E]
        drafts = jnp.full((tokens.shape[0], most), NO_TOKEN, jnp.int32)
        first = draw(network.logits(hidden), network.vocabulary, drafts, 0)
        drafts = drafts.at[:, 0].set(jnp.where(is_ready, first, NO_TOKEN))

        Carry = tuple[jax.Array, jax.Array | None, list[jax.Array]]

        def next_draft(place: jax.Array, carry: Carry) -> Carry:
            drafts, own, kv = carry
            goes_on = is_ready & (num_drafts > place)
            last = lax.dynamic_index_in_dim(drafts, place - 1, axis=1, keepdims=False)
            batch = self._batch(rows, goes_on, 1, end + place, num_rows)
            metadata = self.attention.make_metadata(batch, num_tokens=last.shape[0], decode_only=True)
            positions = jnp.where(goes_on, end + place - 1, 0)
            hidden, kv = network.run(jnp.maximum(last, 0), positions, own, kv, metadata)
            drawn = draw(network.logits(hidden), network.vocabulary, drafts, place)
            drafts = lax.dynamic_update_index_in_dim(drafts, jnp.where(goes_on, drawn, NO_TOKEN), place, axis=1)
            return drafts, hidden if self.reads_features else None, kv

        if most > 1:
            carry = (drafts, hidden if self.reads_features else None, kv)
            drafts, _, kv = lax.fori_loop(1, jnp.max(num_drafts), next_draft, carry)  # as many as a row takes
        return drafts, replace(pages, kv=kv)

    def accept(self, pages: DraftPages, rows: StepRows, drafts: jax.Array, num_accepted: jax.Array) -> DraftPages:
        """The pages after a step. The positions that the network has read now count as read.

        Args:
            drafts: the drafts i32[S, D] of `propose`.
            num_accepted: i32[S], the number of accepted drafts.
        """
        page_size, num_drafts = self.attention.spec.page_size, jnp.sum(drafts != NO_TOKEN, axis=1)
        window, end = self.window(drafts.shape[1]), self._end(rows)
        length = end + self.read_of_drafts(num_accepted, num_drafts)
        positions = jnp.maximum(end - window, 0)[:, None] + jnp.arange(window + drafts.shape[1] - 1)
        page, offset = _place_of(rows, positions, page_size)
        is_filled = (positions < length[:, None]) & (num_drafts > 0)[:, None]
        page = jnp.where(is_filled, page, pages.filled.shape[0])
        return replace(pages, filled=draft_pages.fill(pages.filled, page, offset))

    def _end(self, rows: StepRows) -> jax.Array:
        """i32[S]: the positions that can be read with the tokens that are known, which are those up to `rows.past`."""
        return rows.past + 1 - self.ahead

    def _catch_up(
        self, network: Network, pages: DraftPages, text: jax.Array, rows: StepRows, wanted: jax.Array, end: jax.Array
    ) -> DraftPages:
        """Reads the positions before `end`, i32[S], of the `wanted` rows, bool[S]."""
        page_size = self.attention.spec.page_size

        def unread(length: jax.Array) -> jax.Array:
            return jnp.where(wanted, jnp.maximum(end - length, 0), 0)

        def goes_on(carry: tuple[jax.Array, jax.Array, DraftPages]) -> jax.Array:
            number, length, _ = carry
            return (number < self.max_passes) & (unread(length) > 0).any()

        def one_pass(carry: tuple[jax.Array, jax.Array, DraftPages]) -> tuple[jax.Array, jax.Array, DraftPages]:
            number, length, pages = carry
            left = unread(length)
            count = jnp.clip(self.pass_tokens - (jnp.cumsum(left) - left), 0, left)
            part = _part(rows, length, count)
            row, is_real = row_of_tokens(part, self.pass_tokens)
            index = jnp.arange(self.pass_tokens, dtype=jnp.int32)
            positions = jnp.where(is_real, part.past[row] + index - part.starts[row], 0)
            places = partial(page_text.places, part, page_size=page_size, num_pages=text.shape[0])
            page, offset = places(positions)
            tokens = text.at[places(positions + self.ahead)].get(mode="clip")
            features = None if pages.features is None else pages.features.at[page, offset].get(mode="clip")
            batch = ragged_batch(part, jnp.stack([jnp.sum(count == 1), jnp.sum(count > 0)]), page_size)
            metadata = self.attention.make_metadata(batch, num_tokens=self.pass_tokens, decode_only=False)
            _, kv = network.run(tokens, positions, features, pages.kv, metadata)
            filled = draft_pages.fill(pages.filled, page, offset)
            return number + 1, length + count, replace(pages, kv=kv, filled=filled)

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


def _tokens_at(text: jax.Array, rows: StepRows, positions: jax.Array) -> jax.Array:
    """i32[S, W]: the rows' tokens at positions i32[S, W], up to `rows.past`. The last one is not in the pages."""
    known = text.at[_place_of(rows, positions, text.shape[1])].get(mode="clip")
    is_last = positions == rows.past[:, None]
    return jnp.where(is_last, rows.state[:, SlotLayout.LAST_TOKEN, None], known)


def _place_of(rows: StepRows, positions: jax.Array, page_size: int) -> tuple[jax.Array, jax.Array]:
    """The page of each of the rows' positions i32[S, n] and its offset there. Past the table's end, any page."""
    column = jnp.minimum(SlotLayout.PAGE_TABLE + positions // page_size, rows.state.shape[1] - 1)
    return jnp.take_along_axis(rows.state, column, axis=1), positions % page_size


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
