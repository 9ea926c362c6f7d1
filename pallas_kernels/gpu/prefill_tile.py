"""The shape of a prefill tile: the 64 rows that one warpgroup multiplies, and how they are loaded and masked.

A warpgroup's 64 rows are `tokens` tokens of `heads` query heads that share a KV head, head by head. Every head is one
box of the copy engine. It is read from [T, N * H] without a packed copy of the queries. With four or eight heads, even
a short chunk fills a tile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import vector
from pallas_kernels.gpu.tile_list import (
    TILE_BEGIN,
    TILE_END,
    TILE_END_BLOCK,
    TILE_FIRST_BLOCK,
    TILE_KV_LEN,
    TILE_PART,
    TILE_POSITION,
    TILE_ROW,
    TILE_SHIFT,
    TILE_TOKEN,
    TOKEN_ALIGNMENT,
)

TILE_M = 64  # rows of a warpgroup


@dataclass(frozen=True)
class TileShape:
    """How one KV head's query heads and tokens fill a tile."""

    group: int  # query heads per KV head

    @property
    def heads(self) -> int:
        """The number of query heads in one tile. A larger group takes several tiles, and the last two may overlap."""
        return min(self.group, TILE_M // TOKEN_ALIGNMENT)

    @property
    def tokens(self) -> int:
        """The number of tokens in one tile, a multiple of 8."""
        return TILE_M // self.heads // TOKEN_ALIGNMENT * TOKEN_ALIGNMENT

    @property
    def tiles_per_group(self) -> int:
        """The number of tiles that cover all query heads of one KV head."""
        return -(-self.group // self.heads)

    def place(self, head: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The first tile that has the group's query head `head`, and the head's place among the tile's heads."""
        tile = lax.div(head, jnp.int32(self.heads))
        return tile, head - jnp.minimum(tile * self.heads, self.group - self.heads)

    def first_own(self, part: jax.Array) -> jax.Array:
        """The place of the first head in the KV head's tile number `part` that no earlier tile has."""
        return jnp.maximum(part * self.heads - (self.group - self.heads), 0)

    def first_head(self, kv_head: jax.Array, part: jax.Array) -> jax.Array:
        """The first query head of the KV head's tile number `part`."""
        return kv_head * self.group + jnp.minimum(part * self.heads, self.group - self.heads)


@dataclass(frozen=True)
class Tile:
    """One tile of the list, as scalars. Its fields are those of `tile_list`, and its heads."""

    row: jax.Array
    token: jax.Array
    begin: jax.Array
    end: jax.Array
    position: jax.Array
    kv_len: jax.Array
    first_block: jax.Array
    end_block: jax.Array
    part: jax.Array
    shift: jax.Array
    heads: jax.Array  # its number among the tiles of the same tokens
    kv_head: jax.Array
    first_head: jax.Array

    @classmethod
    def read(cls, tiles_ref: Any, unit: jax.Array, shape: TileShape, num_kv_heads: int) -> Tile:
        """Reads unit `unit` of the launch. A unit is a tile of the list and some heads; the units of one tile are
        neighbours."""
        parts = num_kv_heads * shape.tiles_per_group
        index, heads = lax.div(unit, jnp.int32(parts)), lax.rem(unit, jnp.int32(parts))
        kv_head = lax.div(heads, jnp.int32(shape.tiles_per_group))
        first_head = shape.first_head(kv_head, lax.rem(heads, jnp.int32(shape.tiles_per_group)))
        fields = (
            TILE_ROW, TILE_TOKEN, TILE_BEGIN, TILE_END, TILE_POSITION, TILE_KV_LEN, TILE_FIRST_BLOCK, TILE_END_BLOCK,
            TILE_PART, TILE_SHIFT,
        )  # fmt: skip
        row, token, begin, end, position, kv_len, first_block, end_block, part, shift = (
            tiles_ref[index, field] for field in fields
        )
        return cls(
            row, token, begin, end, position, kv_len, first_block, end_block, part, shift, heads, kv_head, first_head
        )

    @property
    def num_blocks(self) -> jax.Array:
        """The number of KV blocks: up to the last key that the tile's last token sees, or a part of these; 0 for
        padding."""
        return self.end_block - self.first_block

    def masked_from(self, first_token: jax.Array, block_kv: int) -> jax.Array:
        """The first block that needs a mask: every written token from `first_token` on sees all keys of earlier
        blocks."""
        first = jnp.maximum(first_token, self.begin)
        return jnp.clip(lax.div(first + self.position + 1, jnp.int32(block_kv)), self.first_block, self.end_block)


def causal_mask(
    shape: TileShape, tile: Tile, first_token: jax.Array, first_key: jax.Array, block_kv: int, layout: Any
) -> jax.Array:
    """True where a row of the 64 may see a key of the block: bool[64, block_kv]."""
    # One limit per row. Differences of indices would keep 64 registers occupied.
    row = plgpu.broadcasted_iota(jnp.int32, (TILE_M,), 0, layout=layout.reduce(1))
    last = lax.rem(row, jnp.int32(shape.tokens)) + (first_token + tile.position - first_key)
    key = plgpu.broadcasted_iota(jnp.int32, (TILE_M, block_kv), 1, layout=layout)
    return key <= lax.broadcast_in_dim(last, (TILE_M, block_kv), [0])


def for_own_heads(shape: TileShape, tile: Tile, do: Callable[[int], None]) -> None:
    """Calls `do` with the places of the heads whose results the tile writes. If two tiles have a head, the first writes
    it: two copies at the same time would be a race, even if their bits are equal."""
    for g in range(shape.heads):
        if shape.group % shape.heads == 0:
            do(g)
        else:
            part = lax.rem(tile.heads, jnp.int32(shape.tiles_per_group))
            pl.when(g >= shape.first_own(part))(partial(do, g))


def load_queries(
    q_ref: Any, q_smem: Any, shape: TileShape, tile: Tile, first_token: jax.Array, barrier: Any = None
) -> None:
    """Starts the copies of the queries [tokens, H] of every head from [T, N * H] into the head's rows of the tile."""
    tokens = pl.ds(pl.multiple_of(first_token, TOKEN_ALIGNMENT), shape.tokens)
    for g in range(shape.heads):
        plgpu.copy_gmem_to_smem(
            q_ref.at[tokens, vector.head_columns(tile.first_head + g, q_smem.shape[-1])],
            q_smem.at[pl.ds(g * shape.tokens, shape.tokens)],
            *(() if barrier is None else (barrier,)),
            oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
        )
