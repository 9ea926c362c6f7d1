"""The products of rows of few queries in the mixed kernel, such as rows with drafts.

`mixed` computes scores transposed, [tokens, query rows]: each tile of K and V streams past a tile of queries, which has
at least 128 rows. With 4 queries of 4 query heads, only 16 of these rows are needed. Here K and V are the matrix unit's
stationary operands, as in the decode kernel, and only the needed rows stream past them:

    scores  [rows, tokens]       = Q [K of plane 0 | K of plane 1]^T, masked
    weights [rows, tokens]       = exp2(scores - maximum over tokens)
    values  [rows, 128 of each]  = weights [V of plane 0 | V of plane 1], of which each row keeps its own plane's

The rows of a group of planes are those of `slots` queries: plane after plane, head after head, query after query. The
queries are zero in the lanes of the other plane. A row with more queries than slots takes several chunks, each of which
goes through all of the KV block.

A row begins anywhere in a tile of the step's tokens, and neighbouring tokens share words. So `token_rows` has the
queries of each head in 32 bits, from which `slots` rows are loaded from any row on. The outputs go back the same way.

An example: 4 queries of Llama 3 8B, in tokens 6 to 9 of a tile, 4 slots. A group has 2 planes, 8 heads, 32 rows. Rows 0
to 3 are queries 6 to 9 of head 0, rows 4 to 7 those of head 1; rows 16 to 19 those of head 4, which is plane 1's.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.tpu import lanes, paging
from pallas_kernels.tpu.entries import Entry, QueryBlock
from pallas_kernels.tpu.layout import LANES, Geometry
from pallas_kernels.tpu.mixed_memory import FIRST_TOKEN_ROW, Refs
from pallas_kernels.tpu.paging import SUBLANES
from pallas_kernels.tpu.query_blocks import scaled_heads
from pallas_kernels.tpu.tiles import FewBlocks


def begin_queries(refs: Refs, entry: Entry, half: Any, g: Geometry, blocks: FewBlocks) -> None:
    """Rotates and scales the queries, gathers those of each chunk into `spec_decode`, and resets the state."""
    tile = g.token_tile

    def rotate(i: Any, carry: None) -> None:
        tokens = pl.ds(pl.multiple_of(i * tile, tile), tile)
        target = pl.ds(pl.multiple_of(FIRST_TOKEN_ROW + i * tile, SUBLANES), tile)
        for p, place, head in scaled_heads(refs, half, tokens, g):
            refs.token_rows[p * g.queries_per_plane + place, target] = head

    def gather(c: Any, carry: None) -> None:
        first = FIRST_TOKEN_ROW + entry.block.skip + c * blocks.slots
        for group, heads in enumerate(_heads_of_groups(g, blocks)):
            refs.spec_decode[c, group] = _spread(_slots_of(refs.token_rows, heads, first, g, blocks), g, blocks)
        refs.few_tops[c] = jnp.full(refs.few_tops.shape[1:], paging.MASKED, jnp.float32)
        refs.few_sums[c] = jnp.zeros(refs.few_sums.shape[1:], jnp.float32)
        refs.few_values[c] = jnp.zeros(refs.few_values.shape[1:], jnp.float32)

    lax.fori_loop(0, lax.div(entry.block.num_q + (tile - 1), tile), rotate, None)
    lax.fori_loop(0, _num_chunks(entry.block, blocks), gather, None)


def attend(refs: Refs, entry: Entry, kv: Any, live_words: Any, g: Geometry, blocks: FewBlocks) -> None:
    """Adds one KV block to the state of one query block. The block has zeros after its live words."""
    tile_words = blocks.tile_tokens // g.kv_packing
    per_group = blocks.planes_per_group(g)
    groups = [range(p, p + per_group) for p in range(0, g.num_k_planes, per_group)]

    def chunk(c: Any, carry: None) -> None:
        first = entry.position + entry.block.skip + c * blocks.slots  # of the chunk's queries, in the KV block

        def tile(t: Any, carry: None) -> None:
            words = pl.ds(pl.multiple_of(t * tile_words, tile_words), tile_words)
            for i, planes in enumerate(groups):
                k, v = (
                    jnp.concatenate([paging.unpack_kv(kv[p, words], g) for p in own], axis=1)
                    for own in (planes, [g.v_plane(p) for p in planes])
                )
                scores = paging.product(refs.spec_decode[c, i], k, 1, g)
                token = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
                query = lax.rem(lax.broadcasted_iota(jnp.int32, scores.shape, 0), blocks.slots)
                scores = jnp.where(token - query <= first - t * blocks.tile_tokens, scores, paging.MASKED)
                old_top = refs.few_tops[c, i]
                top = jnp.maximum(old_top, jnp.max(scores, axis=1, keepdims=True))
                keep = jnp.exp2(old_top - top)
                weights = jnp.exp2(scores - top[:, :1])
                refs.few_tops[c, i] = top
                refs.few_sums[c, i] = refs.few_sums[c, i] * keep + jnp.sum(weights, axis=1, keepdims=True)
                values = paging.product(weights.astype(g.dtype), v, 0, g)
                refs.few_values[c, i] = refs.few_values[c, i] * keep + _own_plane(values, g, blocks)

        lax.fori_loop(0, lax.div(live_words + (tile_words - 1), tile_words), tile, None)

    lax.fori_loop(0, _num_chunks(entry.block, blocks), chunk, None)


def finish_outputs(refs: Refs, block: QueryBlock, half: Any, g: Geometry, blocks: FewBlocks) -> None:
    """Divides by the sums, and stores the outputs into `out_blocks`; those of other rows' tokens are undefined."""
    tile, slots = g.token_tile, blocks.slots

    def scatter(c: Any, carry: None) -> None:
        own = pl.ds(FIRST_TOKEN_ROW + block.skip + c * slots, slots)
        for group, heads in enumerate(_heads_of_groups(g, blocks)):
            outputs = refs.few_values[c, group] / refs.few_sums[c, group]
            for i, head in enumerate(heads):
                refs.token_rows[head, own] = outputs[i * slots : (i + 1) * slots]

    def collect(i: Any, carry: None) -> None:
        source = pl.ds(pl.multiple_of(FIRST_TOKEN_ROW + i * tile, SUBLANES), tile)
        tokens = pl.ds(pl.multiple_of(i * tile, tile), tile)
        per_block = g.queries_per_plane // g.plane_blocks
        v_planes = [g.v_plane(p) for p in range(g.num_k_planes)]
        for p, kv_scales in enumerate(lanes.scales_of_planes(refs.kv_scales, v_planes, g)):
            for b in range(g.plane_blocks):
                first = p * g.queries_per_plane + b * per_block
                heads = [refs.token_rows[first + j, source] for j in range(per_block)]
                if kv_scales is not None:
                    heads = [head * kv_scales for head in heads]
                lane = (p * g.plane_blocks + b) * LANES
                x = lanes.block_of_heads(heads, b, g)
                refs.out_blocks[half, tokens, lane : lane + LANES] = x.astype(g.dtype)

    lax.fori_loop(0, _num_chunks(block, blocks), scatter, None)
    lax.fori_loop(0, lax.div(block.num_q + (tile - 1), tile), collect, None)


def _num_chunks(block: QueryBlock, blocks: FewBlocks) -> Any:
    return lax.div(block.num_q - block.skip + (blocks.slots - 1), blocks.slots)


def _heads_of_groups(g: Geometry, blocks: FewBlocks) -> list[range]:
    """The query heads of each group, whose number is that of planes times queries of a plane."""
    size = blocks.planes_per_group(g) * g.queries_per_plane
    return [range(begin, begin + size) for begin in range(0, g.num_k_planes * g.queries_per_plane, size)]


def _slots_of(token_rows: Any, heads: range, first: Any, g: Geometry, blocks: FewBlocks) -> jax.Array:
    """f32[group_rows, 128]: `slots` queries of each head, from row `first` on."""
    slots, rows = blocks.slots, max(blocks.slots, SUBLANES)
    per_register = rows // slots
    sublane = lax.broadcasted_iota(jnp.int32, (rows, LANES), 0)
    parts = []
    for begin in range(0, len(heads), per_register):
        part = jnp.zeros((rows, LANES), jnp.float32)
        for j, head in enumerate(heads[begin : begin + per_register]):
            own = token_rows[head, pl.ds(first - j * slots, rows)]
            part = jnp.where(sublane >= j * slots, own, part)
        parts.append(part)
    missing = blocks.group_rows(g) - rows * len(parts)
    if missing:
        parts.append(jnp.zeros((missing, LANES), jnp.float32))
    return jnp.concatenate(parts, axis=0)


def _plane_of_rows(shape: tuple[int, ...], g: Geometry, blocks: FewBlocks) -> jax.Array:
    """The index of each row's plane within its group. Rows of no head have an index past the group's planes."""
    return lax.div(lax.broadcasted_iota(jnp.int32, shape, 0), g.queries_per_plane * blocks.slots)


def _spread(q: jax.Array, g: Geometry, blocks: FewBlocks) -> jax.Array:
    """f32[rows, 128] -> [rows, planes * 128]: each plane's rows keep their lanes, the others are zero there."""
    plane = _plane_of_rows(q.shape, g, blocks)
    own = [jnp.where(plane == p, q, 0.0).astype(g.dtype) for p in range(blocks.planes_per_group(g))]
    return jnp.concatenate(own, axis=1)


def _own_plane(values: jax.Array, g: Geometry, blocks: FewBlocks) -> jax.Array:
    """[rows, planes * 128] -> [rows, 128]: each row's own plane."""
    own = values[:, :LANES]
    plane = _plane_of_rows(own.shape, g, blocks)
    for p in range(1, blocks.planes_per_group(g)):
        own = jnp.where(plane == p, values[:, p * LANES : (p + 1) * LANES], own)
    return own
