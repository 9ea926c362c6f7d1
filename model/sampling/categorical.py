"""Draws tokens in proportion to their weights. The random numbers are a function of seed, position and token.

A token is drawn in two steps with the Gumbel-max trick: first a block of the vocabulary, and then a token in the block.
This takes V / 128 + 128 random numbers instead of V.

Blocks divide the whole vocabulary, so the noise of a token does not depend on the number of chips. If a chip's part
begins or ends inside a block, several chips hold a share of that block. Each chip therefore offers its best whole block
and its shares of its first and last block, each with the best token of the share. One exchange selects the token.

Shape legend: `S` rows of the step, `V` vocabulary (or one chip's part of it), `B` blocks of 128 tokens.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from model.sampling.exact_sum import as_float, exact_sum
from model.sampling.threefry import gumbel, threefry2x32
from model.sampling.vocab_split import VocabShard, first_of_greatest

BLOCK = 128  # tokens


def categorical(shard: VocabShard, weights: jax.Array, seed: jax.Array, positions: jax.Array) -> jax.Array:
    """Draws tokens i32[S] in proportion to `weights` f32[S, V], 0 to 1. `seed` is u32[S, 2], `positions` i32[S]."""
    noise = _noise(shard, seed, positions)
    token_noise = noise[:, _num_blocks(shard) :][:, :BLOCK]
    blocks = _local_blocks(shard, weights)  # [S, B, BLOCK]
    first_block = shard.start // BLOCK
    block_ids = first_block + jnp.arange(blocks.shape[1], dtype=jnp.int32)
    is_whole = (block_ids * BLOCK >= shard.start) & (_end(shard, block_ids) <= shard.start + shard.size)

    masses = exact_sum(blocks)  # u32[3, S, B]
    block_noise = lax.dynamic_slice_in_dim(noise, first_block, blocks.shape[1], axis=1)
    scores = jnp.where(is_whole, jnp.log(as_float(masses)) + block_noise, -jnp.inf)
    offered = [first_of_greatest(scores, block_ids) - first_block]
    is_offered = [is_whole[offered[0]]]
    if shard.num_shards > 1:
        last = (shard.start + shard.size - 1) // BLOCK - first_block
        offered += [jnp.zeros_like(offered[0]), jnp.full_like(offered[0], last)]
        is_offered += [jnp.broadcast_to(x, offered[0].shape) for x in (~is_whole[0], ~is_whole[last] & (last > 0))]
    index, counts = jnp.stack(offered, axis=1), jnp.stack(is_offered, axis=1)  # [S, 3] of several chips, [S, 1] of one

    inside = jnp.take_along_axis(blocks, index[:, :, None], axis=1)  # [S, 3, BLOCK]
    token_scores = jnp.log(inside) + token_noise[:, None]
    lane = first_of_greatest(token_scores, jnp.arange(BLOCK, dtype=jnp.int32))
    return _decide(
        shard,
        noise,
        blocks=first_block + index,
        masses=jnp.where(counts, jnp.take_along_axis(masses, index[None], axis=2), 0),
        tokens=(first_block + index) * BLOCK + lane,
        scores=jnp.where(counts, jnp.max(token_scores, axis=-1), -jnp.inf),
    )


def _num_blocks(shard: VocabShard) -> int:
    return -(-shard.vocab_size // BLOCK)


def _noise(shard: VocabShard, seed: jax.Array, positions: jax.Array) -> jax.Array:
    """Gumbel noise f32[S, V / BLOCK + BLOCK or one more]: first for all blocks, then for the tokens in a block. Every
    chip computes all of it, because an exchange would take longer."""
    index = jnp.arange(-(-(_num_blocks(shard) + BLOCK) // 2), dtype=jnp.uint32)
    position = positions.astype(jnp.uint32)[:, None]
    return gumbel(jnp.concatenate(threefry2x32((seed[:, :1], seed[:, 1:]), (position, index)), axis=1))


def _local_blocks(shard: VocabShard, weights: jax.Array) -> jax.Array:
    """`weights` [S, V] as the shard's blocks [S, B, BLOCK], with zeros for tokens of other chips."""
    num_rows = weights.shape[0]
    most_before = BLOCK - math.gcd(shard.size, BLOCK)  # tokens of other chips in this chip's first block, at most
    width = -(-(most_before + shard.size) // BLOCK) * BLOCK
    if shard.size % BLOCK == 0 or shard.num_shards == 1:
        padded = jnp.pad(weights, ((0, 0), (0, width - shard.size)))
    else:
        nothing = jnp.zeros((num_rows, width), weights.dtype)
        padded = lax.dynamic_update_slice_in_dim(nothing, weights, shard.start % BLOCK, axis=1)
    return padded.reshape(num_rows, -1, BLOCK)


def _end(shard: VocabShard, blocks: jax.Array) -> jax.Array:
    return jnp.minimum((blocks + 1) * BLOCK, shard.vocab_size)


def _decide(
    shard: VocabShard,
    noise: jax.Array,  # f32[S, ...]; the noise of the blocks comes first
    *,
    blocks: jax.Array,  # i32[S, n]
    masses: jax.Array,  # u32[3, S, n], of this chip's share of each; 0 if it is not offered
    tokens: jax.Array,  # i32[S, n], the best of the share
    scores: jax.Array,  # f32[S, n], of that token
) -> jax.Array:
    """The best token i32[S] of the best block of all chips."""
    *parts, blocks, tokens, scores = shard.gather(*masses, blocks, tokens, scores)
    is_same = blocks[:, :, None] == blocks[:, None, :]
    whole = jnp.sum(jnp.where(is_same, jnp.stack(parts)[:, :, None], 0), axis=-1, dtype=jnp.uint32)  # u32[3, S, n]
    block_scores = jnp.log(as_float(whole)) + jnp.take_along_axis(noise, blocks, axis=1)
    best = first_of_greatest(block_scores, blocks)
    token = first_of_greatest(jnp.where(blocks == best[:, None], scores, -jnp.inf), tokens)
    return jnp.minimum(token, shard.vocab_size - 1)  # a row of NaNs
