"""The program of a speculative step: every row brings its last token and drafts, and draws a token after each of them.

A draft is accepted if the token drawn before it, with the row's own parameters, seed and position, equals it. The first
drawn token without an accepted draft is the row's last one of the step. As the drafts are not drawn at random, this is
rejection sampling (arXiv:2211.17192): a draft d is accepted with its probability p(d), and otherwise the token has the
distribution p without d. Beyond that, the tokens are those that steps without drafts draw with the same seeds.

The K/V of rejected drafts stay in the row's pages, past its length. The next steps overwrite them and never read them.

Shape legend: `T` tokens of the step (padded), `S` rows (padded), `D` 1 + num_drafts, `V` vocabulary, `E` embed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from batcher.request import LogprobsMode
from batcher.slots import SlotLayout
from batcher.step import Bucket, Variant
from model.execution import page_text
from model.execution.draft_pages import DraftPages
from model.execution.drafter import NO_TOKEN, Drafter, Draw
from model.execution.prompt_lookup import PromptLookup, propose
from model.execution.rows import (
    StepRows,
    advance,
    ragged_batch,
    read_once,
    row_of_tokens,
    sections,
    step_rows,
)
from model.execution.step import (
    DeviceState,
    KvScales,
    OutputLayout,
    Step,
    apply_patches,
    named,
    run_model,
    step_adapters,
    vocabulary_of,
)
from model.network.eagle import DraftVocabulary
from model.network.llama import Llama
from model.network.lora import AdapterSlots
from model.sampling import sampling
from model.sampling.greedy import all_finite, greedy, greedy_and_finite
from model.sampling.logprobs import logprobs
from model.sampling.vocab_split import BY_VOCAB, REPLICATED, VocabShard, VocabSplit
from pallas_kernels.api import PagedAttention


def make_speculative_step(
    bucket: Bucket,
    rebuild: Callable[[Any], Llama],
    attention: PagedAttention,
    drafter: PromptLookup | Drafter,
    *,
    logprobs_mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS,
    max_loras: int = 0,
) -> Step:
    """The step of one bucket with drafts. The network that drafts has no LoRA adapters; the model that verifies the
    drafts has those of the rows."""

    def step(
        weights: Any, kv_scales: KvScales, state: DeviceState, packed: jax.Array, slots_of_adapters: AdapterSlots = ()
    ) -> tuple[DeviceState, jax.Array]:
        model = rebuild(weights)
        sent = sections(packed, bucket, attention.backend)
        slots = apply_patches(state.slots, jnp.stack([sent["patch_indices"], sent["patch_values"]]))
        rows = read_once(step_rows(slots, sent))
        vocabulary = vocabulary_of(state.history, model, attention)
        draw = partial(_draw_draft, state, vocabulary, rows, bucket)
        proposed, pages = _propose(drafter, weights, state, rows, sent["header"][1], draw, bucket.num_drafts)
        has_room = jnp.arange(bucket.num_drafts, dtype=jnp.int32) < (jnp.diff(rows.starts) - 1)[:, None]
        drafts = jnp.where(has_room, proposed, NO_TOKEN)  # i32[S, D - 1]

        tokens, positions = _tokens(rows, drafts, bucket)
        batch = ragged_batch(rows, sent["header"], attention.spec.page_size)
        metadata = attention.make_metadata(batch, num_tokens=bucket.num_tokens, decode_only=False, spec_decode=True)
        network = drafter if isinstance(drafter, Drafter) else None
        taps = () if network is None else network.taps
        adapters = step_adapters(slots_of_adapters, rows, bucket, model, max_loras)
        hidden, kv, tapped = run_model(
            model, tokens, positions, state.kv, kv_scales, attention, metadata, taps, adapters
        )  # [T, E]
        features = None if network is None else network.features(weights, hidden, tapped)

        drawing, places = _places(rows, bucket.num_drafts)
        logits = model.logits(hidden[drawing])  # f32[S * D, V]
        history = state.history
        outputs: dict[str, jax.Array] = {}
        if bucket.variant is Variant.GREEDY:
            drawn, is_finite = (x.reshape(-1, 1 + bucket.num_drafts) for x in greedy_and_finite(logits))
        else:
            is_finite = all_finite(logits).reshape(-1, 1 + bucket.num_drafts)
            drawn, outputs, history = vocabulary.run(
                partial(draw_after_drafts, mode=logprobs_mode),
                logits,
                history,
                state.masks,
                places,
                drafts,
                in_specs=(BY_VOCAB, BY_VOCAB, *[REPLICATED] * 3),
                out_specs=(REPLICATED, REPLICATED, BY_VOCAB),
            )
        num_accepted = _num_accepted(drawn, drafts)
        is_kept = jnp.arange(drawn.shape[1]) <= num_accepted[:, None]
        outputs |= {
            "tokens": drawn,
            "finite": (is_finite | ~is_kept).all(axis=1).astype(jnp.int32),
            "num_drafts": jnp.sum(drafts != NO_TOKEN, axis=1, dtype=jnp.int32),
            "num_accepted": num_accepted,
            "would_accept": (drawn[:, 0] == proposed[:, 0]).astype(jnp.int32),
        }
        last = jnp.take_along_axis(drawn, num_accepted[:, None], axis=1)[:, 0]
        slots = advance(slots, rows, last, rows.past + 1 + num_accepted)
        state = replace(state, draft=pages).written(
            rows, tokens, positions, features, slots=slots, history=history, kv=kv
        )
        if network is not None:
            assert state.draft is not None
            state = replace(state, draft=network.accept(state.draft, rows, drafts, num_accepted))
        return state, OutputLayout(bucket, hidden.shape[1], tells_would_accept=True).join(outputs)

    return step


def _propose(
    drafter: PromptLookup | Drafter,
    weights: Any,
    state: DeviceState,
    rows: StepRows,
    num_rows: jax.Array,
    draw: Draw,
    most: int,
) -> tuple[jax.Array, DraftPages | None]:
    """Up to `most` drafts of each row, i32[S, D - 1], and the pages of the network that drafts, if there is one."""
    assert state.text is not None, "the ladder has drafts and the runner keeps no text"
    if isinstance(drafter, Drafter):
        assert state.draft is not None, "a network drafts and the runner has no pages for it"
        return drafter.propose(weights, state.draft, state.text, rows, num_rows, draw, most)
    proposed, is_found = propose(page_text.read(state.text, rows), rows.past, most, drafter)
    return jnp.where(is_found[:, None], proposed, NO_TOKEN), state.draft


def _draw_draft(
    state: DeviceState,
    vocabulary: VocabSplit,
    rows: StepRows,
    bucket: Bucket,
    logits: jax.Array,
    of: DraftVocabulary | None,
    drafts: jax.Array,
    place: jax.Array | int,
) -> jax.Array:
    """Draws the drafts at one place (`Draw`). A draft is drawn with the row's parameters, seed and position, like the
    model's own token. The two are then equal more often than two independent draws."""
    if bucket.variant is Variant.GREEDY:
        drawn = greedy(logits)
        return drawn if of is None else of.to_model[drawn]
    logits = logits if of is None else of.spread(logits)
    return vocabulary.run(
        _sample_draft,
        logits,
        state.history,
        state.masks,
        rows,
        drafts,
        rows.past + 1 + place,
        in_specs=(BY_VOCAB, BY_VOCAB, *[REPLICATED] * 4),
        out_specs=REPLICATED,
    )


def _sample_draft(
    shard: VocabShard,
    logits: jax.Array,
    history: jax.Array,
    masks: jax.Array,
    rows: StepRows,
    drafts: jax.Array,
    positions: jax.Array,
) -> jax.Array:
    def with_drafts() -> jax.Array:
        """The token counts i32[S, V], to which the drafts i32[S, n] are added."""
        counts = sampling.history_of(history, rows.slots)
        row = jnp.arange(counts.shape[0])
        for i in range(drafts.shape[1]):
            counts = counts.at[row, shard.locate(drafts[:, i])].add(1, mode="drop")
        return counts

    of_masks = partial(masks.at[rows.slots].get, mode="clip")
    has_drafts = jnp.diff(rows.starts) > 1
    asked = replace(sampling.sampling_rows(rows.state), wants_sampled_logprobs=jnp.zeros_like(has_drafts))
    drawn, _ = sampling.sample(shard, logits, asked, positions, has_drafts, with_drafts, of_masks)
    return drawn


def _tokens(rows: StepRows, drafts: jax.Array, bucket: Bucket) -> tuple[jax.Array, jax.Array]:
    """The step's tokens and their positions, i32[T] each. Padding and missing drafts are 0."""
    brought = jnp.concatenate([rows.state[:, SlotLayout.LAST_TOKEN, None], jnp.maximum(drafts, 0)], axis=1)
    row, is_real = row_of_tokens(rows, bucket.num_tokens)
    place = jnp.arange(bucket.num_tokens, dtype=jnp.int32) - rows.starts[row]
    tokens = brought[row, jnp.minimum(place, bucket.num_drafts)]
    return jnp.where(is_real, tokens, 0), jnp.where(is_real, rows.past[row] + place, 0)


def _places(rows: StepRows, num_drafts: int) -> tuple[jax.Array, StepRows]:
    """The S * D places at which the rows draw. Returns the index i32[S * D] of the step's token at each place, and the
    places as rows. A place past the end of its row has an arbitrary token, and its row does not emit."""
    place = jnp.arange(1 + num_drafts, dtype=jnp.int32)
    q_lens = jnp.diff(rows.starts)[:, None]
    tokens = rows.starts[:-1, None] + jnp.clip(q_lens - 1, 0, place)
    each = partial(jnp.repeat, repeats=1 + num_drafts, axis=0)
    past = rows.past[:, None] + place
    at_places = StepRows(
        slots=each(rows.slots),
        state=each(rows.state),
        starts=rows.starts,
        past=past.ravel(),
        kv_lens=past.ravel() + 1,
        emits=((place < q_lens) & rows.emits[:, None]).ravel(),
    )
    return jnp.minimum(tokens, rows.starts[-1] - 1).clip(0).ravel(), at_places


def draw_after_drafts(
    shard: VocabShard,
    logits: jax.Array,
    history: jax.Array,
    masks: jax.Array,
    places: StepRows,
    drafts: jax.Array,
    *,
    mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS,
) -> tuple[jax.Array, dict[str, jax.Array], jax.Array]:
    """Draws the token after every place. Returns the tokens i32[S, D], their log-probabilities [S * D] by the names in
    `OutputLayout`, and the history, in which rows with penalties count the tokens that they keep.

    Args:
        logits: f32[S * D, V].
        history: i32[num_slots, V].
        masks: i32[num_slots, num_mask_words].
        places: the S * D places as rows.
        drafts: i32[S, D - 1].
    """
    asked = sampling.sampling_rows(places.state)
    num_rows, num_places = drafts.shape[0], 1 + drafts.shape[1]

    def with_drafts() -> jax.Array:
        """The history at each place. The drafts before a place count as output: its token is used only if they are
        accepted."""
        counts = sampling.history_of(history, places.slots)
        place = jnp.tile(jnp.arange(num_places), num_rows)
        for i in range(num_places - 1):  # comparisons fuse with what reads the counts; a scatter would copy them
            before = jnp.where(i < place, jnp.repeat(drafts[:, i], num_places), NO_TOKEN)
            counts += shard.tokens == before[:, None]
        return counts

    of_masks = partial(masks.at[places.slots].get, mode="clip")
    of_place = (shard, logits, asked, places.kv_lens, places.emits, with_drafts, of_masks)
    drawn, sampled = sampling.sample(*of_place)
    scored = partial(sampling.processed, *of_place) if mode.is_processed else lambda: logits
    tokens = jnp.concatenate([drawn[:, None], asked.logprob_token_ids], axis=1)
    found = logprobs(shard, scored, tokens, places.emits & asked.wants_logprobs, mode)

    by_row = drawn.reshape(num_rows, num_places)
    is_kept = jnp.arange(num_places) <= _num_accepted(by_row, drafts)[:, None]
    is_counted = is_kept.ravel() & places.emits & asked.has_penalty
    counted = jnp.where(is_counted, places.slots, history.shape[0])
    history = history.at[counted, shard.locate(drawn)].add(1, mode="drop")
    return by_row, named("", found) | {"sampled_logprobs": sampled}, history


def _num_accepted(drawn: jax.Array, drafts: jax.Array) -> jax.Array:
    """The number i32[S] of leading `drafts` i32[S, D - 1] that equal the tokens `drawn` i32[S, D]."""
    return jnp.sum(jnp.cumprod(drawn[:, :-1] == drafts, axis=1), axis=1, dtype=jnp.int32)
