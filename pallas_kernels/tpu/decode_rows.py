"""Moves the decode kernel's tokens from columns to rows of heads before its first turn, and back after its last turn.

In VMEM the heads of a tile of tokens are lane blocks next to each other, and neighbouring tokens share 32-bit words.
`rows` has the heads of one token one below the other. The blocks of a tile are stored as words, one block below the
other. One load with a stride of a block's words then takes the same token from every block.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu import lanes
from pallas_kernels.tpu.decode_memory import Groups, Refs, group_planes
from pallas_kernels.tpu.layout import LANES, Geometry


def pack_new_tokens(refs: Refs, num_tokens: Any, g: Geometry) -> None:
    """Rotates the new keys, and stores all new K/V as words of neighbouring tokens."""
    tile, tile_words = g.pack_tile, g.pack_tile // g.kv_packing
    scales = lanes.scales_of_planes(refs.kv_scales, range(g.num_planes), g)

    def pack(i: Any, carry: None) -> None:
        own = pl.ds(pl.multiple_of(i * tile, tile), tile)
        for p in range(g.num_planes):
            tokens = refs.new_tokens[own, p * LANES : (p + 1) * LANES]
            if refs.rotation is not None and p < g.num_k_planes:
                tokens = lanes.rotate(tokens, refs.rotations[own], g)
            words = pl.ds(pl.multiple_of(i * tile_words, tile_words), tile_words)
            refs.token_pairs[p, words] = pltpu.bitcast(lanes.stored(tokens, scales[p], g), jnp.uint32)

    _for_each_tile(num_tokens, tile, pack)


def gather_rows(refs: Refs, num_tokens: Any, g: Geometry) -> None:
    """Rotates the queries in `tokens` and stores them in `rows`."""
    groups = group_planes(g)
    scales = [_scales_of_rows(refs, group, groups, 0, g) for group in range(groups.count)]
    tile_words = g.token_tile // g.query_packing

    def gather(i: Any, carry: None) -> None:
        own = pl.ds(pl.multiple_of(i * g.token_tile, g.token_tile), g.token_tile)
        for b in range(g.query_columns // LANES):
            block = refs.tokens[own, b * LANES : (b + 1) * LANES]
            refs.token_words[b * tile_words : (b + 1) * tile_words] = pltpu.bitcast(block, jnp.uint32)

        def gather_word(w: Any, carry: None) -> None:
            for group in range(groups.count):
                words = refs.token_words[_blocks_of(group, groups, groups.part_rows, w, tile_words)]
                for part in range(g.query_packing):
                    token = i * g.token_tile + w * g.query_packing + part
                    x = _part_of_words(words, part, g)
                    if refs.rotation is not None:
                        x = lanes.rotate(x, refs.rotations[pl.ds(token, 1)], g)
                    heads = lanes.heads_of_block(x, _block_in_plane(x, groups), g, scales[group])
                    tile = heads[0] if groups.halves == 1 else jnp.concatenate(heads, axis=0)
                    refs.rows[token, pl.ds(group * groups.rows, groups.rows)] = tile.astype(g.dtype)

        lax.fori_loop(0, tile_words, gather_word, None)

    _for_each_tile(num_tokens, g.token_tile, gather)


def scatter_rows(refs: Refs, num_tokens: Any, g: Geometry) -> None:
    """Stores the outputs in `rows` to `tokens`, and zeros to the rest of the last tile."""
    groups = group_planes(g)
    tile_words = g.token_tile // g.query_packing
    scales = [_scales_of_rows(refs, group, groups, g.v_plane(0), g) for group in range(groups.count)]

    def scatter(i: Any, carry: None) -> None:
        def scatter_word(w: Any, carry: None) -> None:
            for group in range(groups.count):
                words = jnp.zeros((groups.part_rows, LANES), jnp.uint32)
                for part in range(g.query_packing):
                    token = i * g.token_tile + w * g.query_packing + part
                    tile = refs.rows[token, pl.ds(group * groups.rows, groups.rows)].astype(jnp.float32)
                    heads = [tile[h * groups.part_rows : (h + 1) * groups.part_rows] for h in range(groups.halves)]
                    if (own := scales[group]) is not None:
                        heads = [(head * own).astype(g.dtype).astype(jnp.float32) for head in heads]
                    x = lanes.block_of_heads(heads, _block_in_plane(heads[0], groups), g)
                    words |= _words_of_part(jnp.where(token < num_tokens, x, 0.0), part, g)
                refs.token_words[_blocks_of(group, groups, groups.blocks, w, tile_words)] = words[: groups.blocks]

        lax.fori_loop(0, tile_words, scatter_word, None)
        own = pl.ds(pl.multiple_of(i * g.token_tile, g.token_tile), g.token_tile)
        for b in range(g.query_columns // LANES):
            block = pltpu.bitcast(refs.token_words[b * tile_words : (b + 1) * tile_words], g.dtype)
            refs.tokens[own, b * LANES : (b + 1) * LANES] = block

    _for_each_tile(num_tokens, g.token_tile, scatter)


def _for_each_tile(num_tokens: Any, tile: int, body: Any) -> None:
    lax.fori_loop(0, lax.div(num_tokens + (tile - 1), tile), body, None)


def _blocks_of(group: int, groups: Groups, count: int, word: Any, tile_words: int) -> Any:
    """The index in `token_words` of word `word` of `count` blocks, which begin with the group's first block. Blocks of
    no head are never read."""
    return pl.ds(group * groups.blocks * tile_words + word, count, stride=tile_words)


def _scales_of_rows(refs: Refs, group: int, groups: Groups, first_plane: int, g: Geometry) -> jax.Array | None:
    """The scales f32[n, 128] of the lanes of each row of a part; None without scales. `first_plane` is the first plane
    of K or of V."""
    first = first_plane + group * groups.planes
    planes = lanes.scales_of_planes(refs.kv_scales, range(first, first + groups.planes), g)
    row = lax.broadcasted_iota(jnp.int32, (groups.part_rows, LANES), 0)
    own: Any = 0.0
    for p, scales in enumerate(planes):
        own = None if scales is None else jnp.where(row >= p * groups.plane_rows, scales, own)
    return own


def _block_in_plane(x: jax.Array, groups: Groups) -> jax.Array:
    """The index i32[n, 128] of each row's lane block within its plane."""
    return lax.rem(lax.broadcasted_iota(jnp.int32, x.shape, 0), groups.plane_rows)


def _part_of_words(words: jax.Array, part: int, g: Geometry) -> jax.Array:
    """The values f32 in one part of the words. A bfloat16 is the upper half of a float32."""
    if g.query_packing == 2:
        words = words << 16 if part == 0 else words & jnp.uint32(0xFFFF0000)
    return lax.bitcast_convert_type(words, jnp.float32)


def _words_of_part(values: jax.Array, part: int, g: Geometry) -> jax.Array:
    """The inverse of `_part_of_words`, with zeros in the other part. The values are exact in `g.dtype`."""
    words = lax.bitcast_convert_type(values, jnp.uint32)
    return words >> 16 if g.query_packing == 2 and part == 0 else words
