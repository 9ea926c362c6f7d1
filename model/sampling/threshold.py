"""The least weight that top_k, top_p and min_p keep in a row, found without a sort.

Each of the three is a threshold on the weights: tokens with a lower weight are dropped. The highest threshold applies.
An exact search over the bits of a float32 finds it. A sort of the vocabulary would take longer than the model's head.
Tokens of equal weight are kept or dropped together. vLLM and Hugging Face do the same for top_k; for top_p they sort,
and keep arbitrary tokens of a tie.

Shape legend: `S` rows of the step, `V` vocabulary (or one chip's part of it).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from model.sampling.exact_sum import as_float, cut, exact_sum
from model.sampling.vocab_split import VocabShard

ONE = 0x3F800000  # the bits of 1.0

# The number of parts into which a pass cuts the remaining range. On one device, a pass costs as much as its
# measurements, so it halves the range: at most 30 passes, 15 to 29 in practice. Several chips exchange sums after each
# pass, and an exchange takes longer than fifteen measurements. With 16 parts there are at most eight exchanges, four to
# eight in practice.
PARTS_ON_ONE_DEVICE = 2
PARTS_ON_CHIPS = 16
MAX_PASSES_ON_CHIPS = 8

Bounds = tuple[jax.Array, jax.Array, jax.Array, jax.Array]  # low and high bits i32[S]; their sums, u32[3, S]


def kept_threshold(
    shard: VocabShard,
    weights: jax.Array,  # f32[S, V], 0 to 1, the greatest 1
    *,
    top_k: jax.Array,  # i32[S]; 0: off
    top_p: jax.Array,  # f32[S]
    min_p: jax.Array,  # f32[S]
    asking: jax.Array,  # bool[S]
) -> jax.Array:
    """The least weight f32[S] that each row keeps.

    top_k keeps the k most likely tokens. top_p keeps the fewest most likely of these tokens that together have a share
    of top_p or more in the mass of these tokens. min_p keeps the tokens with at least min_p times the greatest weight,
    which is 1.
    """
    threshold = jnp.zeros_like(min_p)
    threshold = raise_threshold(
        shard,
        weights,
        threshold,
        measure=jnp.ones_like,
        target=lambda _kept: top_k.astype(jnp.float32),
        asking=asking & (top_k > 0) & (top_k < shard.vocab_size),
    )
    threshold = raise_threshold(
        shard,
        weights,
        threshold,
        measure=lambda w: w,
        target=lambda kept: top_p * kept,
        asking=asking & (top_p < 1),
    )
    return jnp.maximum(threshold, min_p)


def raise_threshold(
    shard: VocabShard,
    weights: jax.Array,  # f32[S, V], 0 to 1
    threshold: jax.Array,  # f32[S]
    *,
    measure: Callable[[jax.Array], jax.Array],  # of a token's weight: 1 to count tokens, the weight itself for mass
    target: Callable[[jax.Array], jax.Array],  # f32[S], at most its argument: the measure that `threshold` keeps
    asking: jax.Array,  # bool[S]; the others keep their threshold
) -> jax.Array:
    """A threshold f32[S] that is at least `threshold` and keeps the fewest tokens that together measure `target` or
    more.

    Non-negative floats are ordered as their bits, so this is a search over integers. It ends when at most one token is
    left between the bounds. Sums are exact, so the order of the search does not change which tokens are kept.
    """

    def measure_from(bits: jax.Array) -> jax.Array:
        """The sums u32[3, S, n] over all tokens with weights of `bits` i32[S, n] or more. It takes one exchange."""
        at_least = lax.bitcast_convert_type(bits, jnp.float32)[:, :, None]
        each = weights[:, None, :]
        return shard.total(exact_sum(jnp.where(each >= at_least, measure(each), 0)))

    def is_open(bounds: Bounds) -> jax.Array:
        low, high, from_low, from_high = bounds
        least = as_float(jnp.stack(cut(measure(lax.bitcast_convert_type(low, jnp.float32)))))
        has_several = as_float(from_low - from_high) >= 2 * least
        return (asking & (high - low > 1) & has_several).any()

    def search() -> jax.Array:
        num_parts = PARTS_ON_ONE_DEVICE if shard.num_shards == 1 else PARTS_ON_CHIPS
        # `low` keeps enough and `high` keeps nothing: no weight is above 1.
        low = lax.bitcast_convert_type(threshold, jnp.int32)
        bits = _cut_range(low, jnp.full_like(low, ONE + 1), num_parts)
        sums = measure_from(bits[:, :-1])
        enough = target(as_float(sums[:, :, 0]))[:, None]
        bounds = _bounds(bits, jnp.pad(sums, ((0, 0), (0, 0), (0, 1))), enough)

        def narrow(bounds: Bounds) -> Bounds:
            low, high, from_low, from_high = bounds
            bits = _cut_range(low, high, num_parts)
            inside = measure_from(bits[:, 1:-1])
            return _bounds(bits, jnp.concatenate([from_low[..., None], inside, from_high[..., None]], axis=-1), enough)

        if shard.num_shards == 1:
            bounds = lax.while_loop(is_open, narrow, bounds)
        else:
            bounds = _repeat_while(is_open, narrow, bounds, at_most=MAX_PASSES_ON_CHIPS - 1)
        return jnp.where(asking, lax.bitcast_convert_type(bounds[0], jnp.float32), threshold)

    return lax.cond(asking.any(), search, lambda: threshold)


def _cut_range(low: jax.Array, high: jax.Array, num_parts: int) -> jax.Array:
    """Integers i32[S, num_parts + 1] from `low` to `high` inclusive, in steps that are as even as possible."""
    width, parts = (high - low)[:, None], jnp.int32(num_parts)
    index = jnp.arange(num_parts + 1, dtype=jnp.int32)
    # Nothing is negative here: the operators of Python would be several operations each.
    return low[:, None] + lax.div(width, parts) * index + lax.div(lax.rem(width, parts) * index, parts)


def _bounds(bits: jax.Array, sums: jax.Array, enough: jax.Array) -> Bounds:
    """The two adjacent `bits` i32[S, n] between which the measure falls below `enough`. `sums` u32[3, S, n] are the
    measures."""
    num_enough = jnp.sum(as_float(sums[:, :, 1:-1]) >= enough, axis=1, dtype=jnp.int32)
    low, high = num_enough, num_enough + 1
    return _column(bits, low), _column(bits, high), _column(sums, low), _column(sums, high)


def _column(table: jax.Array, index: jax.Array) -> jax.Array:
    """The entries [..., S] of `table` [..., S, n] in the columns `index` i32[S]. A gather is slower to compile."""
    is_asked = jnp.arange(table.shape[-1], dtype=jnp.int32) == index[:, None]
    return jnp.sum(jnp.where(is_asked, table, 0), axis=-1, dtype=table.dtype)


def _repeat_while(
    is_open: Callable[[Bounds], jax.Array], narrow: Callable[[Bounds], Bounds], bounds: Bounds, *, at_most: int
) -> Bounds:
    """An unrolled while loop of nested conditions, because the collectives must not be in a loop."""
    if at_most == 0:
        return bounds
    return lax.cond(
        is_open(bounds),
        lambda bounds: _repeat_while(is_open, narrow, narrow(bounds), at_most=at_most - 1),
        lambda bounds: bounds,
        bounds,
    )
