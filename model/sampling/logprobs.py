"""Log-probabilities of each row's own token, of tokens that the row names, and of the most likely tokens.

Each chip finds the most likely tokens of its part of the vocabulary, and the sum over the part. The small results of
all chips are then merged.

Shape legend: `S` rows, `V` vocabulary (or one chip's part of it).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from batcher.request import MAX_LOGPROBS, LogprobsMode
from model.sampling.vocab_split import VocabShard


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Logprobs:
    """Log-probabilities of a step's rows."""

    named: jax.Array  # f32[S, n], of the row's own token and the others that were asked for
    ranks: jax.Array  # i32[S], 1 + the number of tokens that are more likely than the row's own
    top_ids: jax.Array  # i32[S, MAX_LOGPROBS], most likely first
    top: jax.Array  # f32[S, MAX_LOGPROBS]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Found:
    """A chip's results for its part of the vocabulary. The results of several chips are concatenated."""

    top: jax.Array  # f32[S, k], the greatest logits
    top_ids: jax.Array  # i32[S, k]
    log_sum_exp: jax.Array  # f32[S, 1], over the part's logits; -inf if none of its tokens can be drawn
    named: jax.Array  # f32[S, n], the logits of the tokens that were asked for, equal on all chips
    num_above: jax.Array  # i32[S, 1], tokens of the part with a greater logit than the first of `named`


def logprobs(
    shard: VocabShard,
    logits: Callable[[], jax.Array],
    tokens: jax.Array,
    asking: jax.Array,
    mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS,
) -> Logprobs:
    """The log-probabilities of `tokens` i32[S, n] and of the most likely tokens; zeros if no row asks.

    `logits` gives f32[S, V], raw or processed as `mode` says. `tokens` out of range are clipped.
    """
    return if_asked(asking, lambda: merge(shard, find(shard, logits(), tokens), are_logits=mode.are_logits))


def if_asked[T](asking: jax.Array, compute: Callable[[], T]) -> T:
    """The result of `compute` if some row asks; otherwise zeros of its shape."""

    def zeros() -> T:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(compute))

    return lax.cond(asking.any(), compute, zeros)


def find(shard: VocabShard, logits: jax.Array, tokens: jax.Array) -> Found:
    """The results of this chip. `merge` exchanges them. The logits of `tokens` i32[S, n] are exchanged here, because
    the rank of the first one follows from its logit."""
    top, top_ids = lax.top_k(logits, min(MAX_LOGPROBS, shard.size))
    index = shard.locate(jnp.clip(tokens, 0, shard.vocab_size - 1))
    own = jnp.take_along_axis(logits, jnp.minimum(index, shard.size - 1), axis=1)
    named = shard.total(jnp.where(index < shard.size, own, 0))
    return Found(
        top=top,
        top_ids=top_ids + shard.start,
        log_sum_exp=shard.ops.log_sum_exp(logits)[:, None],
        named=named,
        num_above=jnp.sum(logits > named[:, :1], axis=-1, keepdims=True, dtype=jnp.int32),
    )


def merge(shard: VocabShard, found: Found, *, are_logits: bool = False) -> Logprobs:
    """The log-probabilities, or the logits, from the results of all chips. It takes two exchanges, for floats and for
    integers."""
    top_ids, num_above = shard.gather(found.top_ids, found.num_above)
    top, of_shards = shard.gather(found.top, found.log_sum_exp)
    normaliser = 0 if are_logits else jax.nn.logsumexp(of_shards, axis=-1, keepdims=True)
    num_top = min(MAX_LOGPROBS, shard.vocab_size)
    top, index = lax.top_k(top, num_top)  # equal logits are in the order of their ids
    top_ids = jnp.take_along_axis(top_ids, index, axis=1)
    pad = ((0, 0), (0, MAX_LOGPROBS - num_top))
    return Logprobs(
        named=found.named - normaliser,
        ranks=1 + jnp.sum(num_above, axis=-1),
        top_ids=jnp.pad(top_ids, pad, constant_values=-1),
        top=jnp.pad(top - normaliser, pad, constant_values=-jnp.inf),
    )
