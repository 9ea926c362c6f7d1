"""Draws each row's next token on the device, without a sort. Every row has its own parameters.

The order of stages is logit_bias, penalties, the `min_tokens` ban, the grammar's mask, temperature, top_k, top_p,
min_p, draw. A stage runs only if some row of the step asks for it, and changes only the rows that ask. A row's token
depends on its own logits, parameters, seed and position, never on the other rows.

Each chip works on its own part of the vocabulary (`vocab_split`). The tokens are the same for any number of chips.

Shape legend: `S` rows of the step, `V` vocabulary (or one chip's part of it).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import jax
import jax.numpy as jnp
from jax import lax

from batcher.request import MAX_DEVICE_STOP_IDS, MAX_LOGIT_BIAS
from batcher.sampling_table import PARAMETERS, Column
from batcher.slots import SlotLayout, sampling_columns
from model.sampling.categorical import categorical
from model.sampling.exact_sum import as_float, exact_sum
from model.sampling.logprobs import if_asked
from model.sampling.threshold import kept_threshold
from model.sampling.vocab_split import VocabShard, first_of_greatest

IN_PROMPT = 1 << 30  # bit of a token's history entry: it occurs in the prompt. The lower bits count outputs


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class SamplingRows:
    """The columns of `batcher.sampling_table` for the step's rows."""

    temperature: jax.Array  # f32[S]; 0: greedy
    top_k: jax.Array  # i32[S]; 0: off
    top_p: jax.Array  # f32[S]
    min_p: jax.Array  # f32[S]
    presence_penalty: jax.Array  # f32[S]
    frequency_penalty: jax.Array  # f32[S]
    repetition_penalty: jax.Array  # f32[S]
    seed: jax.Array  # u32[S, 2], low word first
    min_kv_len: jax.Array  # i32[S]; stop ids are banned at positions below it
    num_stop_ids: jax.Array  # i32[S]
    stop_ids: jax.Array  # i32[S, MAX_DEVICE_STOP_IDS]
    num_bias: jax.Array  # i32[S]
    bias_ids: jax.Array  # i32[S, MAX_LOGIT_BIAS]
    bias_values: jax.Array  # f32[S, MAX_LOGIT_BIAS]
    wants_logprobs: jax.Array  # bool[S]
    logprob_token_ids: jax.Array  # i32[S, MAX_LOGPROB_TOKEN_IDS]; those after the last one may be any
    wants_sampled_logprobs: jax.Array  # bool[S]
    has_mask: jax.Array  # bool[S]

    @property
    def has_penalty(self) -> jax.Array:  # bool[S]
        """Whether a row asks for a penalty that counts tokens."""
        penalties = [(getattr(self, name), entry.off) for name, entry in PARAMETERS.items() if entry.counts_tokens]
        return reduce(jnp.logical_or, (column != off for column, off in penalties))


def sampling_rows(state: jax.Array) -> SamplingRows:  # state: i32[S, SlotLayout.width], the rows' slots
    """Reads the columns of `SlotLayout`."""
    return SamplingRows(**{column.name: _read(state, column) for column in sampling_columns()})


def _read(state: jax.Array, column: Column) -> jax.Array:
    """The values of a column: [S] for a number, [S, width] for a list."""
    start = SlotLayout.at(column.name)
    bits = state[:, start] if column.width == 1 else state[:, start : start + column.width]
    return bits != 0 if column.dtype == "bool" else lax.bitcast_convert_type(bits, column.dtype)


def history_of(history: jax.Array, slots: jax.Array) -> jax.Array:
    """The rows i32[S, V] of `history` i32[num_slots, V] at `slots` i32[S]. Slots out of range are clipped."""

    def one_by_one(history: jax.Array, slots: jax.Array) -> jax.Array:
        return lax.map(lambda slot: lax.dynamic_index_in_dim(history, slot, keepdims=False), slots)

    def at_once(history: jax.Array, slots: jax.Array) -> jax.Array:
        return history.at[slots].get(mode="clip")

    # A TPU would copy the whole history for a gather.
    return lax.platform_dependent(history, slots, tpu=one_by_one, default=at_once)


def sample(
    shard: VocabShard,
    logits: jax.Array,  # f32[S, V]
    rows: SamplingRows,
    positions: jax.Array,  # i32[S], position of the drawn token in its sequence
    asking: jax.Array,  # bool[S]: whether the row's token will be used; other rows cause no work
    history: Callable[[], jax.Array],  # i32[S, V], the rows' token histories; read only if some row has a penalty
    masks: Callable[[], jax.Array],  # i32[S, num_mask_words], the rows' masks; read only if some row has one
) -> tuple[jax.Array, jax.Array]:
    """Draws the rows' next tokens i32[S]. Returns them and their log-probabilities f32[S] under the distributions of
    `processed`. The log-probabilities are valid only for rows that want them."""
    adjusted = adjust(shard, logits, rows, positions, asking, history, masks)
    greatest, best = most_likely(shard, adjusted)
    draws = asking & (rows.temperature > 0)
    scored = asking & rows.wants_sampled_logprobs

    def draw() -> tuple[jax.Array, jax.Array]:
        weights, threshold = _weights_to_keep(shard, adjusted, greatest, rows, draws)
        kept = jnp.where(weights >= threshold[:, None], weights, 0)
        tokens = jnp.where(draws, categorical(shard, kept, rows.seed, positions), best)
        # `_log_shares` takes all weights: `kept` would have to be stored in every step.
        return tokens, if_asked(scored, lambda: _log_shares(shard, weights, threshold, tokens))

    return lax.cond((draws | scored).any(), draw, lambda: (best, jnp.zeros_like(greatest)))


def _log_shares(shard: VocabShard, weights: jax.Array, threshold: jax.Array, tokens: jax.Array) -> jax.Array:
    """The logarithm f32[S] of the share that each row's token i32[S] has in the sum of the `weights` f32[S, V] that are
    at least `threshold` f32[S]. It takes one exchange."""
    index = shard.locate(tokens)[:, None]
    own = jnp.take_along_axis(weights, jnp.minimum(index, shard.size - 1), axis=1)
    kept = exact_sum(jnp.where(weights >= threshold[:, None], weights, 0))  # u32[3, S]
    own, *parts = shard.gather(jnp.where(index < shard.size, own, 0), *kept[:, :, None])
    whole = as_float(jnp.sum(jnp.stack(parts), axis=-1, dtype=jnp.uint32))
    return jnp.log(jnp.sum(own, axis=-1)) - jnp.log(whole)


def processed(
    shard: VocabShard,
    logits: jax.Array,
    rows: SamplingRows,
    positions: jax.Array,
    asking: jax.Array,
    history: Callable[[], jax.Array],
    masks: Callable[[], jax.Array],
) -> jax.Array:
    """The logits f32[S, V] of the distribution from which `sample` draws with the same arguments. Tokens that cannot be
    drawn have -inf. Temperature, top_k, top_p and min_p do not apply to greedy rows."""
    adjusted = adjust(shard, logits, rows, positions, asking, history, masks)
    greatest, _ = most_likely(shard, adjusted)
    draws = asking & (rows.temperature > 0)
    weights, threshold = _weights_to_keep(shard, adjusted, greatest, rows, draws)
    temperature = jnp.where(draws, rows.temperature, 1)[:, None]
    return jnp.where(weights >= threshold[:, None], adjusted / temperature, -jnp.inf)


def _weights_to_keep(
    shard: VocabShard, adjusted: jax.Array, greatest: jax.Array, rows: SamplingRows, draws: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The weights f32[S, V] of the logits `adjusted` f32[S, V], and the least weight f32[S] that each row keeps. Rows
    for which `draws` is False have the temperature 1 and keep all weights.

    Args:
        greatest: f32[S], the greatest of `adjusted` in each row.
    """
    weights = tempered_weights(shard, adjusted, greatest, jnp.where(draws, rows.temperature, 1))
    threshold = kept_threshold(shard, weights, top_k=rows.top_k, top_p=rows.top_p, min_p=rows.min_p, asking=draws)
    return weights, jnp.where(draws, threshold, 0)


def most_likely(shard: VocabShard, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The greatest logit of each row, f32[S], and the first token that has it, i32[S]."""
    greatest = jnp.max(logits, axis=-1, keepdims=True)
    best = first_of_greatest(logits, shard.tokens)[:, None]
    greatest, best = shard.gather(greatest, best)
    return jnp.max(greatest, axis=-1), first_of_greatest(greatest, best)


def adjust(
    shard: VocabShard,
    logits: jax.Array,  # f32[S, V]
    rows: SamplingRows,
    positions: jax.Array,  # i32[S]
    asking: jax.Array,  # bool[S]
    history: Callable[[], jax.Array],  # i32[S, V]
    masks: Callable[[], jax.Array],  # i32[S, num_mask_words]
) -> jax.Array:
    """The logits f32[S, V] after bias, penalties, ban and mask. A greedy row takes the token with the greatest."""
    biased = asking & (rows.num_bias > 0)
    penalised = asking & rows.has_penalty
    banned = asking & (positions < rows.min_kv_len) & (rows.num_stop_ids > 0)
    masked = asking & rows.has_mask

    def adjusted(x: jax.Array) -> jax.Array:
        x = _in_place_if(biased.any(), lambda x: _add_bias(shard, x, rows, biased), x)
        x = _in_place_if(penalised.any(), lambda x: jnp.where(penalised[:, None], _penalise(x, rows, history()), x), x)
        x = _in_place_if(banned.any(), lambda x: _ban_stop_ids(shard, x, rows, banned), x)
        return _in_place_if(masked.any(), lambda x: _mask(x, allowed(shard, masks()), masked), x)

    return _in_place_if((biased | penalised | banned | masked).any(), adjusted, logits)


def _in_place_if(asked: jax.Array, change: Callable[[jax.Array], jax.Array], logits: jax.Array) -> jax.Array:
    """`change(logits)` if `asked`, a scalar. XLA copies an operand that a branch of a conditional returns unchanged.
    The state of a loop stays in its buffer, also if no iteration runs."""
    return lax.while_loop(lambda state: state[0], lambda state: (~state[0], change(state[1])), (asked, logits))[1]


def _add_bias(shard: VocabShard, logits: jax.Array, rows: SamplingRows, biased: jax.Array) -> jax.Array:
    row = jnp.arange(logits.shape[0])[:, None]
    place = jnp.arange(MAX_LOGIT_BIAS, dtype=jnp.int32)
    index = shard.locate(rows.bias_ids)  # [S, MAX_LOGIT_BIAS]
    is_added = biased[:, None] & (place < rows.num_bias[:, None]) & (index < shard.size)
    # A request has one bias for a token. If no two indices are equal, chips do not sort them first.
    index = jnp.where(is_added, index, shard.size + place)
    return logits.at[row, index].add(rows.bias_values, mode="drop", unique_indices=True)


def _penalise(logits: jax.Array, rows: SamplingRows, history: jax.Array) -> jax.Array:
    """Applies the repetition penalty (arXiv:1909.05858) over prompt and output, as vLLM and Hugging Face do. Then it
    applies the frequency and presence penalties over output only, as in OpenAI's API."""
    outputs = history & (IN_PROMPT - 1)
    repetition = rows.repetition_penalty[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(history != 0, repeated, logits)
    logits = logits - rows.frequency_penalty[:, None] * outputs.astype(jnp.float32)
    return logits - rows.presence_penalty[:, None] * (outputs > 0)


def _mask(logits: jax.Array, allowed: jax.Array, masked: jax.Array) -> jax.Array:
    return jnp.where(masked[:, None] & ~allowed, -jnp.inf, logits)


def _ban_stop_ids(shard: VocabShard, logits: jax.Array, rows: SamplingRows, banned: jax.Array) -> jax.Array:
    row = jnp.arange(logits.shape[0])[:, None]
    is_set = banned[:, None] & (jnp.arange(MAX_DEVICE_STOP_IDS) < rows.num_stop_ids[:, None])
    index = jnp.where(is_set, shard.locate(rows.stop_ids), shard.size)  # [S, MAX_DEVICE_STOP_IDS]
    return logits.at[row, index].set(-jnp.inf, mode="drop")


def allowed(shard: VocabShard, masks: jax.Array) -> jax.Array:  # i32[S, num_mask_words] -> bool[S, V]
    """This shard's bits of the masks. Token i of the vocabulary is bit i % 32 of word i // 32."""
    num_words = -(-shard.size // 32) + 1  # the shard may begin within a word
    words = jnp.pad(masks, ((0, 0), (0, num_words)))
    words = lax.dynamic_slice_in_dim(words, shard.start // 32, num_words, axis=1)
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.int32)) & 1
    bits = bits.reshape(masks.shape[0], num_words * 32)
    return lax.dynamic_slice_in_dim(bits, shard.start % 32, shard.size, axis=1) != 0


def tempered_weights(
    shard: VocabShard,
    logits: jax.Array,  # f32[S, V]
    greatest: jax.Array,  # f32[S], over the whole vocabulary
    temperature: jax.Array,  # f32[S]
) -> jax.Array:
    """The weights f32[S, V], exp((logit - greatest) / temperature): the tempered distribution, scaled so that the
    greatest weight is 1."""
    return shard.ops.temper(logits, greatest, temperature)
