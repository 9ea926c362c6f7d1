"""Draws each row's next token on the device: every request in a step with its own parameters, and without a sort.

Order, for every row that asks: logit_bias, penalties, the `min_tokens` ban, temperature, top_k, top_p, min_p, draw.
Each stage runs only if some row of the step asks for it, and changes only the rows that do: a row's token depends on
its own logits, parameters, seed and position, never on the rows beside it.

top_k, top_p and min_p all keep "the tokens at least as likely as some threshold". So each of them is a threshold on
the weights exp(logit - max), the highest one holds, and the token is drawn from what is left. The thresholds come from
a bisection over the bits of a float32: exact, where a sort of the vocabulary would cost more than the model's head.
Tokens of equal weight are kept or dropped together, as in vLLM and Hugging Face for top_k; for top_p they sort, and
keep some arbitrary ones of a tie.

Shape legend: `S` rows of the step, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from batcher.request import MAX_DEVICE_STOP_IDS, MAX_LOGIT_BIAS, MAX_LOGPROBS
from batcher.step import SlotLayout
from model.threefry import gumbel, threefry2x32

IN_PROMPT = 1 << 30  # in a token's entry of the history: it occurs in the prompt. The bits below count outputs
DRAW_BLOCK = 128  # tokens; the draw picks a block of the vocabulary, then a token in it


@partial(jax.tree_util.register_dataclass)
@dataclass(frozen=True, kw_only=True)
class SamplingRows:
    """`batcher.request.SamplingParams` of the step's rows, as columns."""

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

    @property
    def has_penalty(self) -> jax.Array:  # bool[S]
        return (self.presence_penalty != 0) | (self.frequency_penalty != 0) | (self.repetition_penalty != 1)


def sampling_rows(state: jax.Array) -> SamplingRows:  # state: i32[S, SlotLayout.width], the rows' slots
    """Reads the columns of `SlotLayout`."""
    at = SlotLayout

    def ints(column: int) -> jax.Array:
        return state[:, column]

    def floats(column: int) -> jax.Array:
        return lax.bitcast_convert_type(state[:, column], jnp.float32)

    return SamplingRows(
        temperature=floats(at.TEMPERATURE),
        top_k=ints(at.TOP_K),
        top_p=floats(at.TOP_P),
        min_p=floats(at.MIN_P),
        presence_penalty=floats(at.PRESENCE_PENALTY),
        frequency_penalty=floats(at.FREQUENCY_PENALTY),
        repetition_penalty=floats(at.REPETITION_PENALTY),
        seed=lax.bitcast_convert_type(state[:, at.SEED_LOW : at.SEED_HIGH + 1], jnp.uint32),
        min_kv_len=ints(at.MIN_KV_LEN),
        num_stop_ids=ints(at.NUM_STOP_IDS),
        stop_ids=state[:, at.STOP_IDS : at.STOP_IDS + MAX_DEVICE_STOP_IDS],
        num_bias=ints(at.NUM_BIAS),
        bias_ids=state[:, at.BIAS_IDS : at.BIAS_IDS + MAX_LOGIT_BIAS],
        bias_values=lax.bitcast_convert_type(state[:, at.BIAS_VALUES : at.BIAS_VALUES + MAX_LOGIT_BIAS], jnp.float32),
        wants_logprobs=ints(at.WANTS_LOGPROBS) != 0,
    )


def greedy(logits: jax.Array) -> jax.Array:  # f32[S, V] -> i32[S]
    """The most likely token."""
    return _first_max(logits)


def _first_max(values: jax.Array) -> jax.Array:  # f32[S, n] -> i32[S]
    """Where the first of the greatest is. Two plain reductions: XLA's argmax takes a CPU twice as long as both."""
    size = values.shape[-1]
    # Without the barrier XLA would write the greatest out once for every value.
    is_best = values == lax.optimization_barrier(jnp.max(values, axis=-1, keepdims=True))
    first = jnp.min(jnp.where(is_best, jnp.arange(size, dtype=jnp.int32), size), axis=-1)
    return jnp.minimum(first, size - 1)  # a row with a NaN has no greatest


def sample(
    logits: jax.Array,  # f32[S, V]
    rows: SamplingRows,
    positions: jax.Array,  # i32[S], that the drawn token will have in its sequence
    asking: jax.Array,  # bool[S]: the row's token will be used; nothing is computed for the sake of another
    history: Callable[[], jax.Array],  # i32[S, V], the rows of `token history`; read only if some row has a penalty
) -> jax.Array:
    """The rows' next tokens, i32[S]."""
    adjusted = adjust(logits, rows, positions, asking, history)
    best = greedy(adjusted)
    draws = asking & (rows.temperature > 0)
    return lax.cond(draws.any(), lambda: jnp.where(draws, _draw(adjusted, rows, positions, draws), best), lambda: best)


def adjust(
    logits: jax.Array,  # f32[S, V]
    rows: SamplingRows,
    positions: jax.Array,  # i32[S]
    asking: jax.Array,  # bool[S]
    history: Callable[[], jax.Array],  # i32[S, V]
) -> jax.Array:
    """The logits [S, V] after bias, penalties and ban: what greedy rows take the best of."""
    biased = asking & (rows.num_bias > 0)
    penalised = asking & rows.has_penalty
    banned = asking & (positions < rows.min_kv_len) & (rows.num_stop_ids > 0)
    logits = _where_asked(biased, lambda x: _add_bias(x, rows), logits)
    logits = _where_asked(penalised, lambda x: _penalise(x, rows, history()), logits)
    return _where_asked(banned, lambda x: _ban_stop_ids(x, rows), logits)


def _where_asked(asked: jax.Array, change: Callable[[jax.Array], jax.Array], logits: jax.Array) -> jax.Array:
    return lax.cond(asked.any(), lambda x: jnp.where(asked[:, None], change(x), x), lambda x: x, logits)


def _add_bias(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    row = jnp.arange(logits.shape[0])[:, None]
    is_set = jnp.arange(MAX_LOGIT_BIAS) < rows.num_bias[:, None]
    ids = jnp.where(is_set, rows.bias_ids, logits.shape[1])  # [S, MAX_LOGIT_BIAS]
    return logits.at[row, ids].add(rows.bias_values, mode="drop")


def _penalise(logits: jax.Array, rows: SamplingRows, history: jax.Array) -> jax.Array:
    """Repetition (arXiv:1909.05858, over prompt and output, as vLLM and Hugging Face apply it), then
    frequency and presence (over output only, as in OpenAI's API)."""
    outputs = history & (IN_PROMPT - 1)
    repetition = rows.repetition_penalty[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(history != 0, repeated, logits)
    logits = logits - rows.frequency_penalty[:, None] * outputs.astype(jnp.float32)
    return logits - rows.presence_penalty[:, None] * (outputs > 0)


def _ban_stop_ids(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    row = jnp.arange(logits.shape[0])[:, None]
    is_set = jnp.arange(MAX_DEVICE_STOP_IDS) < rows.num_stop_ids[:, None]
    ids = jnp.where(is_set, rows.stop_ids, logits.shape[1])  # [S, MAX_DEVICE_STOP_IDS]
    return logits.at[row, ids].set(-jnp.inf, mode="drop")


def _draw(logits: jax.Array, rows: SamplingRows, positions: jax.Array, draws: jax.Array) -> jax.Array:
    temperature = jnp.where(draws, rows.temperature, 1)
    weights = tempered_weights(logits, temperature)
    threshold = kept_threshold(weights, rows, draws)
    weights = jnp.where(weights >= threshold[:, None], weights, 0)
    return categorical(weights, rows.seed, positions)


def tempered_weights(logits: jax.Array, temperature: jax.Array) -> jax.Array:  # [S, V], f32[S] -> f32[S, V]
    """exp of (logit - max) / temperature: the tempered distribution but for a factor, the greatest weight being 1."""
    return jnp.exp((logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature[:, None])


def kept_threshold(weights: jax.Array, rows: SamplingRows, asking: jax.Array) -> jax.Array:
    """f32[S]: a row's token is kept if its weight is at least this. `weights` [S, V] as from `tempered_weights`.

    top_k keeps the k most likely tokens; top_p the fewest of those, most likely first, whose share of their mass is
    top_p or more; min_p those of at least min_p times the greatest weight, which is 1.
    """
    asks_k = asking & (rows.top_k > 0) & (rows.top_k < weights.shape[-1])
    asks_p = asking & (rows.top_p < 1)

    def narrow(stage: jax.Array, threshold: jax.Array) -> jax.Array:
        """Stage 0 is top_k, stage 1 top_p: one loop in the program serves both."""
        is_top_k = stage == 0
        return raise_threshold(
            weights,
            threshold,
            measure=lambda w: jnp.where(is_top_k, 1.0, w),
            target=lambda kept: jnp.where(is_top_k, rows.top_k.astype(jnp.float32), rows.top_p * kept),
            asking=jnp.where(is_top_k, asks_k, asks_p),
        )

    everything = jnp.zeros_like(rows.min_p)
    threshold = lax.cond((asks_k | asks_p).any(), lambda: lax.fori_loop(0, 2, narrow, everything), lambda: everything)
    return jnp.maximum(threshold, rows.min_p)


def raise_threshold(
    weights: jax.Array,  # f32[S, V], 0 to 1
    threshold: jax.Array,  # f32[S]
    *,
    measure: Callable[[jax.Array], jax.Array],  # of a token's weight: 1 to count tokens, the weight itself for mass
    target: Callable[[jax.Array], jax.Array],  # f32[S], of the measure of what `threshold` keeps; at most that
    asking: jax.Array,  # bool[S]; the others keep their threshold
) -> jax.Array:
    """f32[S]: a higher threshold, which keeps the fewest tokens that together measure `target` or more.

    Floats that are not negative have the order of their bits, so this is a bisection over integers: at most 30 passes
    over the weights, and 10 to 15 in practice, since it ends when one token is left between the bounds.
    """
    one = lax.bitcast_convert_type(jnp.float32(1), jnp.int32)

    def measure_from(bits: jax.Array) -> jax.Array:
        is_kept = weights >= lax.bitcast_convert_type(bits, jnp.float32)[:, None]
        return jnp.sum(jnp.where(is_kept, measure(weights), 0), axis=-1)

    # `low` keeps enough and `high` does not: above 1 there is nothing.
    low = lax.bitcast_convert_type(threshold, jnp.int32)
    kept = measure_from(low)
    enough = target(kept)

    def is_open(bounds: tuple[jax.Array, ...]) -> jax.Array:
        low, high, from_low, from_high = bounds
        has_several = from_low - from_high >= 2 * measure(lax.bitcast_convert_type(low, jnp.float32))
        return asking & (high - low > 1) & has_several

    def halve(bounds: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        low, high, from_low, from_high = bounds
        middle = low + (high - low) // 2
        from_middle = measure_from(middle)
        is_raised = is_open(bounds) & (from_middle >= enough)
        is_lowered = is_open(bounds) & ~(from_middle >= enough)
        return (
            jnp.where(is_raised, middle, low),
            jnp.where(is_lowered, middle, high),
            jnp.where(is_raised, from_middle, from_low),
            jnp.where(is_lowered, from_middle, from_high),
        )

    bounds = (low, jnp.full_like(low, one + 1), kept, jnp.zeros_like(kept))
    low, *_ = lax.while_loop(lambda bounds: is_open(bounds).any(), halve, bounds)
    return lax.bitcast_convert_type(low, jnp.float32)


def categorical(weights: jax.Array, seed: jax.Array, positions: jax.Array) -> jax.Array:
    """i32[S] drawn in proportion to `weights` [S, V]; the noise is a function of the row's seed and position.

    Two draws by Gumbel's maximum, of a block and of a token in it, make one draw of a token, and take V / 128 + 128
    random numbers instead of V.
    """
    num_rows, vocab = weights.shape
    blocks = jnp.pad(weights, ((0, 0), (0, -vocab % DRAW_BLOCK))).reshape(num_rows, -1, DRAW_BLOCK)
    num_blocks = blocks.shape[1]
    index = jnp.arange(-(-(num_blocks + DRAW_BLOCK) // 2), dtype=jnp.uint32)
    position = positions.astype(jnp.uint32)[:, None]
    noise = gumbel(jnp.concatenate(threefry2x32((seed[:, :1], seed[:, 1:]), (position, index)), axis=1))
    block = _first_max(jnp.log(jnp.sum(blocks, axis=-1)) + noise[:, :num_blocks])
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]  # [S, DRAW_BLOCK]
    return block * DRAW_BLOCK + _first_max(jnp.log(inside) + noise[:, num_blocks : num_blocks + DRAW_BLOCK])


@partial(jax.tree_util.register_dataclass)
@dataclass(frozen=True, kw_only=True)
class Logprobs:
    """Log-probabilities under the raw distribution."""

    chosen: jax.Array  # f32[S], of the row's own token
    top_ids: jax.Array  # i32[S, MAX_LOGPROBS], most likely first
    top: jax.Array  # f32[S, MAX_LOGPROBS]


def logprobs(logits: jax.Array, tokens: jax.Array, asking: jax.Array) -> Logprobs:
    """`logits` f32[S, V] as the model gave them; `tokens` i32[S], clipped to the vocabulary; zeros if no row asks."""
    num_rows, vocab = logits.shape
    num_top = min(MAX_LOGPROBS, vocab)

    def compute() -> Logprobs:
        normaliser = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        top, top_ids = lax.top_k(logits, num_top)
        pad = ((0, 0), (0, MAX_LOGPROBS - num_top))
        chosen = jnp.take_along_axis(logits, jnp.clip(tokens, 0, vocab - 1)[:, None], axis=1)
        return Logprobs(
            chosen=(chosen - normaliser)[:, 0],
            top_ids=jnp.pad(top_ids, pad, constant_values=-1),
            top=jnp.pad(top - normaliser, pad, constant_values=-jnp.inf),
        )

    def zeros() -> Logprobs:
        return Logprobs(
            chosen=jnp.zeros(num_rows, jnp.float32),
            top_ids=jnp.zeros((num_rows, MAX_LOGPROBS), jnp.int32),
            top=jnp.zeros((num_rows, MAX_LOGPROBS), jnp.float32),
        )

    return lax.cond(asking.any(), compute, zeros)
