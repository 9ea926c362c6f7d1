"""The queries of a query block before its first KV block, and its outputs after the last, in the mixed kernel.

Queries and outputs are copied in whole tiles of tokens. Where two rows meet in a tile, `out_tile` keeps its outputs
until all are there. The first tile may begin with outputs of the decode kernel; tokens that pad the step get zeros.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu import lanes, paging
from pallas_kernels.tpu.entries import Entry, QueryBlock
from pallas_kernels.tpu.layout import LANES, Geometry
from pallas_kernels.tpu.mixed_memory import Refs
from pallas_kernels.tpu.tiles import MixedBlocks, Tiles

CHUNK_TOKENS = 16  # tokens whose queries are rotated at a time: their rotation stays in registers


def begin_queries(refs: Refs, entry: Entry, half: Any, g: Geometry, blocks: MixedBlocks) -> None:
    """Rotates the queries, and scales them once for all KV blocks, so exp2 of a score needs no factor."""
    tile_queries = blocks.tile_queries(g)
    size = min(CHUNK_TOKENS, tile_queries)

    def chunk(i: Any, carry: None) -> None:
        tokens = pl.ds(pl.multiple_of(i * size, size), size)
        tile = lax.div(i * size, tile_queries)
        first_row = tile * blocks.tile_rows + i * size - tile * tile_queries  # of the chunk's first head
        for p, place, head in scaled_heads(refs, half, tokens, g):
            rows = pl.ds(pl.multiple_of(first_row + place * tile_queries, size), size)
            refs.q_scaled[p, rows] = head.astype(g.dtype)

    lax.fori_loop(0, lax.div(entry.block.num_q + (size - 1), size), chunk, None)
    tiles = Tiles.of(g, blocks, num_q=entry.block.num_q, position=entry.position)

    # Tiles of another size have other masks.
    made_for = tiles.mask_phase + blocks.mask_key(g)

    @pl.when(made_for != refs.mask_phase[0])
    def _() -> None:
        refs.mask_phase[0] = made_for
        shape = blocks.tile_tokens, blocks.mask_rows(g)

        def make_mask(i: Any, carry: None) -> None:
            token = lax.broadcasted_iota(jnp.int32, shape, 0)
            query = lax.rem(lax.broadcasted_iota(jnp.int32, (1, shape[1]), 1), tile_queries)
            visible = token <= query + tiles.distance(i)
            refs.masks[i, :, : shape[1]] = jnp.where(visible, -paging.MASKED, paging.MASKED)

        lax.fori_loop(1, blocks.num_masks(g), make_mask, None)


def scaled_heads(refs: Refs, half: Any, tokens: Any, g: Geometry) -> Iterator[tuple[int, int, jax.Array]]:
    """The queries f32[tokens, H] of each head, rotated and scaled, with the number of its K plane and its place there.

    Args:
        half: of the queries' two buffers.
        tokens: a slice of the query block.
    """
    scale = g.scale * math.log2(math.e)
    rotation = None if refs.rotation is None else refs.q_rotations[half, tokens] * scale
    for p, kv_scales in enumerate(lanes.scales_of_planes(refs.kv_scales, range(g.num_k_planes), g)):
        for b in range(g.plane_blocks):
            lane = (p * g.plane_blocks + b) * LANES
            x = refs.q_blocks[half, tokens, lane : lane + LANES]
            x = x.astype(jnp.float32) * scale if rotation is None else lanes.rotate(x, rotation, g)
            heads = lanes.heads_of_block(x, b, g, kv_scales)
            for place, head in enumerate(heads, b * len(heads)):
                yield p, place, head


def reset_state(refs: Refs, at: tuple[Any, ...]) -> None:
    """The state before a first KV block, of all tiles or of one plane's tile."""
    refs.tops[at] = jnp.full(refs.tops.shape[len(at) :], paging.MASKED, jnp.float32)
    refs.values[at] = jnp.zeros(refs.values.shape[len(at) :], jnp.float32)


def finish_outputs(refs: Refs, block: QueryBlock, half: Any, g: Geometry, blocks: MixedBlocks) -> None:
    """Divides by the sums, stores the outputs into `out_blocks`, and resets the state. Outputs of other rows' tokens
    are undefined."""
    tile_queries = blocks.tile_queries(g)
    num_tiles = lax.div(block.num_q + (tile_queries - 1), tile_queries)
    per_block = g.queries_per_plane // g.plane_blocks

    def plane_tile(i: Any, carry: None) -> None:
        p, t = lax.div(i, num_tiles), lax.rem(i, num_tiles)
        (kv_scales,) = lanes.scales_of_planes(refs.kv_scales, [g.v_plane(p)], g)

        # Rows of several heads that fill whole lanes are transposed together.
        size = max(tile_queries, LANES)

        @functools.cache
        def transposed(part: int) -> jax.Array:
            values = refs.values[p, t, :, part * size : (part + 1) * size]
            output = values[:LANES] * (1.0 / values[LANES : LANES + 1])  # [128, size]
            if kv_scales is None and g.head_dim == LANES:
                return output.astype(g.dtype).T  # half as many registers to transpose
            return output.T if kv_scales is None else output.T * kv_scales

        def head(j: int) -> jax.Array:
            part, begin = divmod(j * tile_queries, size)
            return transposed(part)[begin : begin + tile_queries]

        tokens = pl.ds(pl.multiple_of(t * tile_queries, tile_queries), tile_queries)
        for b in range(g.plane_blocks):
            lane = pl.multiple_of((p * g.plane_blocks + b) * LANES, LANES)
            x = lanes.block_of_heads([head(b * per_block + j) for j in range(per_block)], b, g)
            refs.out_blocks[half, tokens, pl.ds(lane, LANES)] = x.astype(g.dtype)
        reset_state(refs, (p, t))

    lax.fori_loop(0, g.num_k_planes * num_tiles, plane_tile, None)


def wait_for_outputs(refs: Refs, half: Any) -> None:
    """Waits until what was stored into this half of `out_blocks` before is in HBM."""
    paging.wait_rows(refs.out_blocks.at[half], refs.out_rows[half], refs.out_sems.at[half])


def send_outputs(refs: Refs, query_block: QueryBlock, half: Any, g: Geometry) -> None:
    """Starts the copy of the whole tiles of `out_blocks` to HBM, and keeps the rest in `out_tile`."""
    tile, block, sem = g.token_tile, refs.out_blocks.at[half], refs.out_sems.at[half]
    skip, num_q = query_block.skip, query_block.num_q

    @pl.when(skip > 0)
    def _() -> None:
        token = lax.broadcasted_iota(jnp.int32, refs.out_tile.shape, 0)
        block[:tile] = jnp.where(token < skip, refs.out_tile[...], block[:tile])

    num_rows = pl.multiple_of(num_q - lax.rem(num_q, tile), tile)

    @pl.when(num_rows < num_q)
    def _() -> None:
        refs.out_tile[...] = block[pl.ds(num_rows, tile)]

    refs.out_rows[half] = num_rows

    @pl.when(num_rows > 0)
    def _() -> None:
        target = refs.out.at[pl.ds(query_block.start, num_rows)]
        pltpu.make_async_copy(block.at[pl.ds(0, num_rows)], target, sem).start()


def begin_output(refs: Refs, begin_row: Any, g: Geometry) -> None:
    """Fetches the tile in which the decode kernel's outputs end, if it is to be completed."""
    tile = g.token_tile
    for half in range(2):
        refs.out_rows[half] = 0
    begin = refs.query_starts[begin_row]

    @pl.when(lax.rem(begin, tile) > 0)
    def _() -> None:
        load = pltpu.make_async_copy(
            _out_rows(refs, g, lax.div(begin, tile) * tile, tile), refs.out_tile, refs.tile_sem
        )
        load.start()
        load.wait()


def end_output(refs: Refs, end_row: Any, g: Geometry) -> None:
    """Stores the last tile, and zeros for the tokens that pad the step."""
    tile = g.token_tile
    for half in range(2):
        wait_for_outputs(refs, half)
    end = refs.query_starts[end_row]
    live = lax.rem(end, tile)

    @pl.when(live > 0)
    def _() -> None:
        outputs = refs.out_tile[...]
        token = lax.broadcasted_iota(jnp.int32, outputs.shape, 0)
        refs.out_tile[...] = jnp.where(token < live, outputs, jnp.zeros_like(outputs))
        store = pltpu.make_async_copy(refs.out_tile, _out_rows(refs, g, end - live, tile), refs.tile_sem)
        store.start()
        store.wait()

    refs.out_tile[...] = jnp.zeros(refs.out_tile.shape, refs.out_tile.dtype)
    first = lax.div(end + (tile - 1), tile)

    def zero(i: Any, start: bool) -> None:
        copy = pltpu.make_async_copy(refs.out_tile, _out_rows(refs, g, i * tile, tile), refs.tile_sem)
        copy.start() if start else copy.wait()

    num_tiles = refs.out.shape[0] // tile
    lax.fori_loop(first, num_tiles, lambda i, _: zero(i, True), None)
    lax.fori_loop(first, num_tiles, lambda i, _: zero(i, False), None)


def _out_rows(refs: Refs, g: Geometry, begin: Any, size: int) -> Any:
    return refs.out.at[pl.ds(pl.multiple_of(begin, g.token_tile), size)]
