"""The compiled program of a step: forward pass, K/V pages, sampling, and the state that the next step reads.

A step is one program. The host sends one int32 buffer (`batcher.step.PackedLayout`) and reads one back
(`OutputLayout`). Everything else stays on the device: a row of `SlotLayout` per request slot, the token history of
requests with penalties, the masks of requests with grammars, and the K/V pages. All of these are donated: every step
updates them in place.

Shape legend: `T` tokens of the step (padded), `S` rows (padded), `W` columns of the slot state, `V` vocabulary,
`D` embed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from batcher.request import MAX_LOGPROB_TOKEN_IDS, MAX_LOGPROBS, LogprobsMode, Pooling
from batcher.slots import SlotLayout
from batcher.step import Bucket, StepOutput, Variant
from model.execution import draft_pages, page_text
from model.execution.draft_pages import DraftPages
from model.execution.drafter import Drafter
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
from model.network.layers import Attend, AttendProjected, tokens_at
from model.network.llama import Llama
from model.network.lora import AdapterSlots, StepAdapters
from model.sampling import row_blocks, sampling
from model.sampling.greedy import all_finite, greedy_and_finite
from model.sampling.logprobs import Logprobs, find, if_asked, logprobs, merge
from model.sampling.vocab_split import BY_VOCAB, REPLICATED, VocabShard, VocabSplit
from pallas_kernels.api import PagedAttention

SCORE_BLOCK = 64  # rows of logits computed at a time when prompt tokens are scored
HISTORY_BLOCK = 4096  # most prompt tokens, and most output tokens, of one dispatch of `reset_history`
HISTORY_BLOCK_SIZE = 2 + 2 * HISTORY_BLOCK

# The function that is compiled for a bucket: (weights, K/V scales, state, packed i32[PackedLayout.size]) -> (state,
# output). If rows may have LoRA adapters, the adapter slots are the last argument.
Step = Callable[..., tuple["DeviceState", jax.Array]]
# For each layer f32[2, K], the scales of keys and values in 8-bit pages; None if pages have the activations' dtype.
KvScales = Sequence[jax.Array | None]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DeviceState:
    """The state that stays on the device between steps. It is donated to every program that takes it."""

    slots: jax.Array  # i32[num_slots, W], columns as in SlotLayout
    history: jax.Array  # i32[num_slots, V], values as in sampling.IN_PROMPT; split by vocabulary; used with penalties
    masks: jax.Array  # i32[num_slots, num_mask_words], whole on every chip; sent again for each token under a grammar
    kv: list[jax.Array]  # the K/V pages of each layer, in the layout of pallas_kernels
    text: jax.Array | None = None  # i32[P, page_size], the tokens of the K/V in each page; None: there are no drafts
    draft: DraftPages | None = None  # the pages of the network that drafts; None: there is none

    def written(
        self,
        rows: StepRows,
        tokens: jax.Array,
        positions: jax.Array,
        features: jax.Array | None = None,
        **changed: Any,
    ) -> DeviceState:
        """The state after a step.

        Args:
            tokens, positions: the step's tokens and their positions, i32[T] each.
            features: the model's features [T, E] that an EAGLE head reads; None: there is no head.
            changed: new values of other fields.
        """
        text, draft = self.text, self.draft
        if text is not None:
            text = page_text.write(text, rows, tokens, positions)
        if text is not None and draft is not None:
            filled = draft_pages.take_back(draft.filled, rows, positions, text.shape[1])
            draft = replace(draft, filled=filled)
            if features is not None:
                at = page_text.places(rows, positions, page_size=text.shape[1], num_pages=text.shape[0])
                draft = draft_pages.keep_features(draft, features, *at)
        return replace(self, text=text, draft=draft, **changed)


@dataclass(frozen=True)
class OutputLayout:
    """The sections of a step's result, which is one i32 buffer. Floats are bitcast to i32."""

    bucket: Bucket
    hidden_size: int
    tells_would_accept: bool = False  # a section says whether the first draft of each row is right

    def shapes(self) -> dict[str, tuple[tuple[int, ...], type]]:
        """Name of a section -> its shape and dtype, in the order of the buffer."""
        t, s, d = self.bucket.num_tokens, self.bucket.num_rows, 1 + self.bucket.num_drafts
        shapes: dict[str, tuple[tuple[int, ...], type]] = {"tokens": ((s, d), np.int32), "finite": ((s,), np.int32)}
        if self.bucket.num_drafts:
            shapes |= {"num_drafts": ((s,), np.int32), "num_accepted": ((s,), np.int32)}
        if self.tells_would_accept:
            shapes["would_accept"] = ((s,), np.int32)
        if self.bucket.variant is Variant.GREEDY:
            return shapes
        shapes |= _logprob_shapes("", (s, d)) | {"sampled_logprobs": ((s, d), np.float32)}
        shapes["asked_logprobs"] = ((s, d, MAX_LOGPROB_TOKEN_IDS), np.float32)
        if self.bucket.variant.scores:
            shapes |= _logprob_shapes("target_", (t,))
        if self.bucket.variant is Variant.EMBED:
            shapes["pooled"] = ((s, self.hidden_size), np.float32)
        return shapes

    def join(self, arrays: dict[str, jax.Array]) -> jax.Array:
        """The buffer of these sections. It runs inside the program."""
        return jnp.concatenate([lax.bitcast_convert_type(arrays[name].ravel(), jnp.int32) for name in self.shapes()])

    @property
    def size(self) -> int:
        """The number of i32 of all sections."""
        return sum(math.prod(shape) for shape, _ in self.shapes().values())

    def split(self, buffer: np.ndarray) -> StepOutput:
        """The sections of a buffer as views of it. The buffer may be longer. It runs on the host."""
        fields: dict[str, np.ndarray] = {}
        start = 0
        for name, (shape, dtype) in self.shapes().items():
            size = int(np.prod(shape))
            fields[name] = buffer[start : start + size].view(dtype).reshape(shape)
            start += size
        truths = {name: fields[name] != 0 for name in ("finite", "would_accept") if name in fields}
        return StepOutput(**fields | truths)


def _logprob_shapes(prefix: str, of: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], type]]:
    return {
        f"{prefix}logprobs": (of, np.float32),
        f"{prefix}ranks": (of, np.int32),
        f"{prefix}top_ids": ((*of, MAX_LOGPROBS), np.int32),
        f"{prefix}top_logprobs": ((*of, MAX_LOGPROBS), np.float32),
    }


def make_step(
    bucket: Bucket,
    rebuild: Callable[[Any], Llama],
    attention: PagedAttention,
    *,
    pooling: Pooling | None = None,
    lookup: PromptLookup | None = None,
    drafter: Drafter | None = None,
    logprobs_mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS,
    max_loras: int = 0,
) -> Step:
    """The step of one bucket, which draws one token a row and verifies no drafts.

    Args:
        rebuild: weights -> the model. The weights are an argument of the program; the model's structure is not.
        pooling: how hidden states are pooled, if the bucket's variant is EMBED.
        lookup: the prompt lookup. In steps whose header asks for it, its drafts are compared with the drawn tokens.
            None: there is none.
        drafter: the network that drafts in other steps. This step keeps the features that it will read. None: there
            is none.
        logprobs_mode: which log-probabilities of the drawn tokens are returned.
        max_loras: the number of adapter slots, if the bucket has adapters.
    """

    def step(
        weights: Any, kv_scales: KvScales, state: DeviceState, packed: jax.Array, slots_of_adapters: AdapterSlots = ()
    ) -> tuple[DeviceState, jax.Array]:
        model = rebuild(weights)
        sent = sections(packed, bucket, attention.backend)
        slots = apply_patches(state.slots, jnp.stack([sent["patch_indices"], sent["patch_values"]]))
        rows = step_rows(slots, sent)
        rows = rows if state.text is None else read_once(rows)

        tokens, positions = _tokens(rows, sent["tokens"], bucket)
        batch = ragged_batch(rows, sent["header"], attention.spec.page_size)
        metadata = attention.make_metadata(batch, num_tokens=bucket.num_tokens, decode_only=bucket.decode_only)
        taps = () if drafter is None else drafter.taps
        adapters = step_adapters(slots_of_adapters, rows, bucket, model, max_loras)
        needs_all = bucket.variant.scores or bucket.variant is Variant.EMBED or drafter is not None
        last = None if bucket.decode_only else _last_tokens(rows, bucket)
        hidden, kv, tapped = run_model(
            model,
            tokens,
            positions,
            state.kv,
            kv_scales,
            attention,
            metadata,
            taps,
            adapters,
            None if needs_all else last,
        )  # hidden [T, D], or [S, D] if only the last tokens are computed
        features = None if drafter is None else drafter.features(weights, hidden, tapped)

        of_rows = hidden if last is None or not needs_all else tokens_at(hidden, last)
        logits = model.logits(of_rows)  # f32[S, V]
        history = state.history
        vocabulary = vocabulary_of(history, model, attention)
        outputs: dict[str, jax.Array] = {}
        if bucket.variant is Variant.GREEDY:
            drawn, is_finite = greedy_and_finite(logits)
        else:
            is_finite = all_finite(logits)
            drawn, outputs, history = draw(vocabulary, logits, history, state.masks, rows, logprobs_mode)
        outputs["finite"] = is_finite.astype(jnp.int32)
        if bucket.variant.scores:
            outputs |= named("target_", _score(model, vocabulary, hidden, sent["targets"]))
        if bucket.variant is Variant.EMBED:
            assert pooling is not None, "the ladder embeds and the runner does not"
            outputs["pooled"] = pool(hidden, rows.starts, pooling)
        outputs["tokens"] = drawn
        slots = advance(slots, rows, drawn, rows.kv_lens)
        state = state.written(rows, tokens, positions, features, slots=slots, history=history, kv=kv)
        if lookup is not None:
            assert state.text is not None, "a lookup needs the text"
            # The lookup reads the updated text: XLA would copy a text that is written after the lookup.
            look = partial(_would_accept, state.text, rows, drawn, lookup)
            outputs["would_accept"] = lax.cond(sent["header"][3] != 0, look, lambda: jnp.zeros_like(drawn))
        return state, OutputLayout(bucket, hidden.shape[1], tells_would_accept=lookup is not None).join(outputs)

    return step


def run_model(
    model: Llama,
    tokens: jax.Array,  # i32[T]
    positions: jax.Array,  # i32[T]
    kv: list[jax.Array],
    kv_scales: KvScales,
    attention: PagedAttention,
    metadata: Any,
    taps: Sequence[int] = (),
    adapters: StepAdapters | None = None,
    only: jax.Array | None = None,
) -> tuple[jax.Array, list[jax.Array], list[jax.Array]]:
    """The hidden states [T, D], the pages with the K/V of the step's tokens, and the inputs [T, D] of the layers in
    `taps`. `taps`, `adapters` and `only` are those of `Llama.run`."""
    attend = attend_in_pages(attention, metadata)
    if model.ops.are_in_c:
        is_real = jnp.arange(len(tokens), dtype=jnp.int32) < metadata.query_starts[-1]
        tokens = jnp.where(is_real, tokens, -1)  # the C code skips -1 (`Llama.embed`)
    return model.run(tokens, positions, list(zip(kv, kv_scales, strict=True)), attend, taps, adapters, only)


def step_adapters(
    slots: AdapterSlots, rows: StepRows, bucket: Bucket, model: Llama, max_loras: int
) -> StepAdapters | None:
    """The LoRA adapters of the step's tokens; None if the program has no adapters."""
    if not bucket.has_adapters:
        return None
    of_tokens = rows.state[:, SlotLayout.ADAPTER]
    if bucket.num_tokens != len(of_tokens):
        of_tokens = of_tokens[row_of_tokens(rows, bucket.num_tokens)[0]]
    return StepAdapters(slots, of_tokens, num_slots=max_loras, num_shards=model.num_shards, ops=model.ops)


def attend_in_pages(attention: PagedAttention, metadata: Any) -> Attend | AttendProjected:
    """The attention of a step's rows. The K/V argument for a layer is (its pages, their scales), and the result has the
    updated pages."""

    @jax.jit  # traced once for all layers: when programs come from the disk, tracing takes most of the start
    def attend(
        queries: jax.Array, keys: jax.Array, values: jax.Array, kv: tuple[jax.Array, jax.Array | None]
    ) -> tuple[jax.Array, jax.Array]:
        pages, scales = kv
        return attention(queries, keys, values, pages, metadata, kv_scales=scales)

    @jax.jit
    def attend_projected(
        columns: jax.Array, cos: jax.Array, sin: jax.Array, kv: tuple[jax.Array, jax.Array | None]
    ) -> tuple[jax.Array, jax.Array]:
        pages, scales = kv
        return attention.projected(columns, cos, sin, pages, metadata, kv_scales=scales)

    return AttendProjected(attend_projected) if attention.takes_projection else attend


def _tokens(rows: StepRows, sent: jax.Array, bucket: Bucket) -> tuple[jax.Array, jax.Array]:
    """The step's tokens and their positions, i32[T] each; both are 0 in padding."""
    last = rows.state[:, SlotLayout.LAST_TOKEN]
    if bucket.decode_only:
        return jnp.where(sent < 0, last, sent), rows.past
    row, is_real = row_of_tokens(rows, bucket.num_tokens)
    tokens = jnp.where(sent < 0, last[row], sent)
    positions = rows.past[row] + jnp.arange(bucket.num_tokens, dtype=jnp.int32) - rows.starts[row]
    return jnp.where(is_real, tokens, 0), jnp.where(is_real, positions, 0)


def _last_tokens(rows: StepRows, bucket: Bucket) -> jax.Array:
    """The index i32[S] of each row's last token in the step; num_tokens in padding."""
    return jnp.where(jnp.diff(rows.starts) > 0, rows.starts[1:] - 1, bucket.num_tokens)


def vocabulary_of(history: jax.Array, model: Llama, attention: PagedAttention) -> VocabSplit:
    """How the vocabulary of a state's history, i32[num_slots, V], is split over chips and blocks of rows."""
    # Several chips do not use blocks: they exchange the results of all rows at once.
    in_blocks = attention.backend.is_of_tpus and attention.num_shards == 1
    return VocabSplit(history.shape[1], attention.mesh, ops=model.ops, in_blocks=in_blocks)


def draw(
    vocabulary: VocabSplit, logits: jax.Array, history: jax.Array, masks: jax.Array, rows: StepRows, mode: LogprobsMode
) -> tuple[jax.Array, dict[str, jax.Array], jax.Array]:
    """Draws the next tokens i32[S] of the rows that emit. Returns them, their log-probabilities by the names in
    `OutputLayout`, and the updated history."""
    drawing = _DrawingRows(slots=rows.slots, state=rows.state, kv_lens=rows.kv_lens, emits=rows.emits)

    def draw_rows(part: tuple[jax.Array, _DrawingRows], history: jax.Array) -> tuple[Any, jax.Array]:
        *drawn, history = vocabulary.run(
            partial(_draw, mode=mode),
            part[0],
            history,
            masks,
            part[1],
            in_specs=(BY_VOCAB, BY_VOCAB, REPLICATED, REPLICATED),
            out_specs=(REPLICATED, REPLICATED, BY_VOCAB),
        )
        return drawn, history

    if vocabulary.in_blocks:
        num_used = jnp.max(jnp.where(rows.emits, 1 + jnp.arange(len(rows.emits), dtype=jnp.int32), 0))
        (drawn, found), history = row_blocks.in_blocks(draw_rows, (logits, drawing), history, num_used)
    else:
        (drawn, found), history = draw_rows((logits, drawing), history)
    return drawn, found, history


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class _DrawingRows:
    """The fields of `StepRows` that decide the drawn tokens. Each has one entry for each row."""

    slots: jax.Array
    state: jax.Array
    kv_lens: jax.Array
    emits: jax.Array


def _draw(
    shard: VocabShard,
    logits: jax.Array,
    history: jax.Array,
    masks: jax.Array,
    rows: _DrawingRows,
    *,
    mode: LogprobsMode,
) -> tuple[jax.Array, dict[str, jax.Array], jax.Array]:
    """The rows' next tokens, their log-probabilities, and the history, in which rows with penalties count the
    tokens."""
    asked = sampling.sampling_rows(rows.state)
    of_history = partial(sampling.history_of, history, rows.slots)
    of_masks = partial(masks.at[rows.slots].get, mode="clip")
    of_row = (shard, logits, asked, rows.kv_lens, rows.emits, of_history, of_masks)
    drawn, sampled = sampling.sample(*of_row)
    scored = partial(sampling.processed, *of_row) if mode.is_processed else lambda: logits
    tokens = jnp.concatenate([drawn[:, None], asked.logprob_token_ids], axis=1)
    found = logprobs(shard, scored, tokens, rows.emits & asked.wants_logprobs, mode)
    nowhere = history.shape[0] + jnp.arange(len(drawn), dtype=jnp.int32)  # all different, so chips need not sort them
    counted = jnp.where(rows.emits & asked.has_penalty, rows.slots, nowhere)
    history = history.at[counted, shard.locate(drawn)].add(1, mode="drop", unique_indices=True)
    return drawn, named("", found) | {"sampled_logprobs": sampled}, history


def _would_accept(text: jax.Array, rows: StepRows, drawn: jax.Array, lookup: PromptLookup) -> jax.Array:
    """i32[S]: 1 where a lookup would have found the drawn token. `text` contains the step's tokens."""
    drafts, is_found = propose(page_text.of_pages(text, rows), rows.past, 1, lookup)
    return (is_found & (drafts[:, 0] == drawn)).astype(jnp.int32)


def _score(model: Llama, vocabulary: VocabSplit, hidden: jax.Array, targets: jax.Array) -> Logprobs:
    """Log-probabilities and ranks of `targets` i32[T], each after a hidden state of `hidden` [T, D].

    A block of rows is computed at a time, because the logits of all tokens of a large step would not fit into memory.
    Chips exchange the targets' logits for each block, and their results once, after all blocks.
    """
    num_tokens, embed = hidden.shape
    padding = -num_tokens % SCORE_BLOCK
    hidden = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(-1, SCORE_BLOCK, embed)
    targets = jnp.pad(targets, (0, padding), constant_values=-1).reshape(-1, SCORE_BLOCK)
    look = partial(vocabulary.run, find, in_specs=(BY_VOCAB, REPLICATED), out_specs=BY_VOCAB)
    found = lax.map(lambda x: if_asked(x[1] >= 0, lambda: look(model.logits(x[0]), x[1][:, None])), (hidden, targets))
    found = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:num_tokens], found)
    return vocabulary.run(merge, found, in_specs=(BY_VOCAB,), out_specs=REPLICATED)


def pool(hidden: jax.Array, starts: jax.Array, pooling: Pooling) -> jax.Array:
    """f32[S, D]: the hidden state of each row's last token in the step, or the sum over its tokens.

    Args:
        hidden: [T, D], after the final norm.
        starts: i32[S + 1], the index of each row's first token, and the end of the last row.
    """
    if pooling is Pooling.LAST:
        return hidden[jnp.maximum(starts[1:] - 1, 0)].astype(jnp.float32)
    index = jnp.arange(hidden.shape[0], dtype=jnp.int32)
    is_own = (index >= starts[:-1, None]) & (index < starts[1:, None])  # [S, T]
    # A product adds in a fixed order; a scatter on a GPU does not. NaN and infinity would spread to other rows in a
    # product, so they are replaced by 0, and the sum of their own row is set to NaN afterwards.
    is_finite = jnp.isfinite(hidden).all(axis=-1)
    clean = jnp.where(is_finite[:, None], hidden, 0).astype(jnp.float32)
    sums = jnp.matmul(is_own.astype(jnp.float32), clean, precision=lax.Precision.HIGHEST)
    return jnp.where((is_own & ~is_finite).any(axis=1)[:, None], jnp.nan, sums)


def named(prefix: str, found: Logprobs) -> dict[str, jax.Array]:
    """The log-probabilities under their names in `OutputLayout`."""
    asked = {} if prefix else {"asked_logprobs": found.named[:, 1:]}
    return asked | {
        f"{prefix}logprobs": found.named[:, 0],
        f"{prefix}ranks": found.ranks,
        f"{prefix}top_ids": found.top_ids,
        f"{prefix}top_logprobs": found.top,
    }


def apply_patches(slots: jax.Array, patches: jax.Array) -> jax.Array:
    """Writes `patches` i32[2, n], flat indices and values, to `slots` i32[num_slots, W]. An index past the end is
    padding."""
    return slots.ravel().at[patches[0]].set(patches[1], mode="drop").reshape(slots.shape)


def bring_masks(masks: jax.Array, block: jax.Array) -> jax.Array:
    """Writes the rows of one block of `StepInput.masks` to `masks` i32[num_slots, num_mask_words]."""
    return masks.at[block[:, 0]].set(block[:, 1:], mode="drop")


def reset_history(history: jax.Array, block: jax.Array, *, mesh: Mesh | None) -> jax.Array:
    """Adds one block of `history_blocks` to the history row of its slot. A request's first block clears the row."""
    vocabulary = VocabSplit(history.shape[1], mesh)
    return vocabulary.run(_count, history, block, in_specs=(BY_VOCAB, REPLICATED), out_specs=BY_VOCAB)


def _count(shard: VocabShard, history: jax.Array, block: jax.Array) -> jax.Array:
    slot, begins = block[0], block[1] != 0
    prompt, output = (shard.locate(part) for part in (block[2 : 2 + HISTORY_BLOCK], block[2 + HISTORY_BLOCK :]))
    row = jnp.where(begins, 0, history[slot])
    row = row.at[prompt].set(sampling.IN_PROMPT, mode="drop").at[output].add(1, mode="drop")
    return history.at[slot].set(row)


def history_blocks(slot: int, prompt: np.ndarray, output: np.ndarray, vocab_size: int) -> list[np.ndarray]:
    """Splits a token history into buffers i32[HISTORY_BLOCK_SIZE]: slot, whether the buffer is the first, prompt
    tokens, output tokens.

    Padding is a token id past the vocabulary. Output tokens start in the last block of the prompt: a later prompt
    token would overwrite the count of an output token.
    """
    num_prompt_blocks = -(-len(prompt) // HISTORY_BLOCK)
    output_from = max(num_prompt_blocks - 1, 0)  # the last block of the prompt also takes output
    num_blocks = max(num_prompt_blocks, output_from + -(-len(output) // HISTORY_BLOCK), 1)
    blocks = []
    for i in range(num_blocks):
        block = np.full(HISTORY_BLOCK_SIZE, vocab_size, np.int32)
        block[:2] = slot, i == 0
        for tokens, index, start in ((prompt, i, 2), (output, i - output_from, 2 + HISTORY_BLOCK)):
            part = tokens[index * HISTORY_BLOCK : (index + 1) * HISTORY_BLOCK] if index >= 0 else ()
            block[start : start + len(part)] = part
        blocks.append(block)
    return blocks
