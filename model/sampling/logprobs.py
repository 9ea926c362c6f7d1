"""Log-probabilities of each row's own token and of the most likely tokens.

Each chip finds the most likely tokens of its part of the vocabulary, and the sum over the part. The small results of
all chips are then merged.

Shape legend: `S` rows, `V` vocabulary (or one chip's part of it).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from batcher.request import MAX_LOGPROBS, LogprobsMode
from model.sampling.vocab_split import VocabShard


@partial(jax.tree_util.register_dataclass)
@dataclass(frozen=True, kw_only=True)
class Logprobs:
    """Log-probabilities of a step's rows."""

    chosen: jax.Array  # f32[S], log-probability of the row's own token
    top_ids: jax.Array  # i32[S, MAX_LOGPROBS], most likely first
    top: jax.Array  # f32[S, MAX_LOGPROBS]


@partial(jax.tree_util.register_dataclass)
@dataclass(frozen=True, kw_only=True)
class Found:
    """A chip's results for its part of the vocabulary. The results of several chips are concatenated."""

    top: jax.Array  # f32[S, k], the greatest logits
    top_ids: jax.Array  # i32[S, k]
    log_sum_exp: jax.Array  # f32[S, 1], over the part's logits; -inf if none of its tokens can be drawn
    chosen: jax.Array  # f32[S, 1], the logit of the row's own token; 0 if another chip has it


@partial(jax.tree_util.register_dataclass)
@dataclass(frozen=True, kw_only=True)
class Ranked:
    """A chip's results, and the number of tokens in its part that are more likely than the row's own."""

    found: Found
    num_above: jax.Array  # i32[S, 1]


def logprobs(
    shard: VocabShard,
    logits: Callable[[], jax.Array],
    tokens: jax.Array,
    asking: jax.Array,
    mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS,
) -> Logprobs:
    """The log-probabilities of `tokens` i32[S] and of the most likely tokens; zeros if no row asks.

    `logits` gives f32[S, V], raw or processed as `mode` says. `tokens` out of range are clipped.
    """
    return if_asked(asking, lambda: merge(shard, find(shard, logits(), tokens), are_logits=mode.are_logits))


def if_asked[T](asking: jax.Array, compute: Callable[[], T]) -> T:
    """The result of `compute` if some row asks; otherwise zeros of its shape."""

    def zeros() -> T:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(compute))

    return lax.cond(asking.any(), compute, zeros)


def find(shard: VocabShard, logits: jax.Array, tokens: jax.Array) -> Found:
    """The results of this chip. `merge` exchanges them."""
    top, top_ids = lax.top_k(logits, min(MAX_LOGPROBS, shard.size))
    own = shard.locate(jnp.clip(tokens, 0, shard.vocab_size - 1))[:, None]
    chosen = jnp.take_along_axis(logits, jnp.minimum(own, shard.size - 1), axis=1)
    return Found(
        top=top,
        top_ids=top_ids + shard.start,
        log_sum_exp=shard.ops.log_sum_exp(logits)[:, None],
        chosen=jnp.where(own < shard.size, chosen, 0),
    )


def find_ranked(shard: VocabShard, logits: jax.Array, tokens: jax.Array) -> Ranked:
    """The results of `find`, and the numbers from which `merge_ranked` computes the ranks of `tokens`. It exchanges the
    logits of the tokens once."""
    found = find(shard, logits, tokens)
    num_above = jnp.sum(logits > shard.total(found.chosen), axis=-1, keepdims=True, dtype=jnp.int32)
    return Ranked(found=found, num_above=num_above)


def merge_ranked(shard: VocabShard, ranked: Ranked) -> tuple[Logprobs, jax.Array]:
    """The log-probabilities, and the ranks of the rows' own tokens, i32[S]: 1 for the most likely one."""
    (num_above,) = shard.gather(ranked.num_above)
    return merge(shard, ranked.found), 1 + jnp.sum(num_above, axis=-1)


def merge(shard: VocabShard, found: Found, *, are_logits: bool = False) -> Logprobs:
    """The log-probabilities, or the logits, from the results of all chips. It takes two exchanges, for floats and for
    ids."""
    (top_ids,) = shard.gather(found.top_ids)
    top, of_shards, chosen = shard.gather(found.top, found.log_sum_exp, found.chosen)
    normaliser = 0 if are_logits else jax.nn.logsumexp(of_shards, axis=-1, keepdims=True)
    num_top = min(MAX_LOGPROBS, shard.vocab_size)
    top, index = lax.top_k(top, num_top)  # equal logits are in the order of their ids
    top_ids = jnp.take_along_axis(top_ids, index, axis=1)
    pad = ((0, 0), (0, MAX_LOGPROBS - num_top))
    return Logprobs(
        chosen=(jnp.sum(chosen, axis=-1, keepdims=True) - normaliser)[:, 0],
        top_ids=jnp.pad(top_ids, pad, constant_values=-1),
        top=jnp.pad(top - normaliser, pad, constant_values=-jnp.inf),
    )
