"""The shape of a prefill tile: the 64 rows that one warpgroup multiplies, and how they are loaded and masked.

A warpgroup's 64 rows are `tokens` tokens of `heads` query heads that share a KV head, head by head. Every head is one
box of the copy engine, read from [T, N * H] without a packed copy of the queries. So even a short chunk fills a tile,
with four or eight heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu.work_list import (
    TILE_BEGIN,
    TILE_END,
    TILE_KV_LEN,
    TILE_POSITION,
    TILE_ROW,
    TILE_TOKEN,
    TOKEN_ALIGNMENT,
)

TILE_M = 64  # rows of a warpgroup
MASKED = -1e30  # finite, so a row without keys does not become NaN


@dataclass(frozen=True)
class TileShape:
    """How one KV head's query heads and tokens fill a tile."""

    group: int  # query heads per KV head

    @property
    def heads(self) -> int:
        """Query heads in one tile; a larger group takes several tiles, of which the last two may overlap."""
        return min(self.group, TILE_M // TOKEN_ALIGNMENT)

    @property
    def tokens(self) -> int:
        """Tokens in one tile, a multiple of 8."""
        return TILE_M // self.heads // TOKEN_ALIGNMENT * TOKEN_ALIGNMENT

    @property
    def tiles_per_group(self) -> int:
        """Tiles that cover all query heads of one KV head."""
        return -(-self.group // self.heads)

    def first_head(self, kv_head: jax.Array, part: jax.Array) -> jax.Array:
        """The first query head of the KV head's tile number `part`."""
        return kv_head * self.group + jnp.minimum(part * self.heads, self.group - self.heads)


@dataclass(frozen=True)
class Tile:
    """One tile of the list, as scalars. Its fields are those of `work_list.prefill_tiles`, and its heads."""

    row: jax.Array
    token: jax.Array
    begin: jax.Array
    end: jax.Array
    position: jax.Array
    kv_len: jax.Array
    kv_head: jax.Array
    first_head: jax.Array

    @classmethod
    def read(cls, tiles_ref, unit: jax.Array, shape: TileShape, num_kv_heads: int) -> Tile:
        """Unit `unit` of the launch, whose units are the tiles of the list for all heads, tile by tile."""
        parts = num_kv_heads * shape.tiles_per_group
        index, part = lax.div(unit, jnp.int32(parts)), lax.rem(unit, jnp.int32(parts))
        kv_head = lax.div(part, jnp.int32(shape.tiles_per_group))
        first_head = shape.first_head(kv_head, lax.rem(part, jnp.int32(shape.tiles_per_group)))
        fields = (TILE_ROW, TILE_TOKEN, TILE_BEGIN, TILE_END, TILE_POSITION, TILE_KV_LEN)
        row, token, begin, end, position, kv_len = (tiles_ref[index, field] for field in fields)
        return cls(row, token, begin, end, position, kv_len, kv_head, first_head)

    def num_blocks(self, block_kv: int) -> jax.Array:
        """KV blocks up to the last key that the tile's last token may see; none for padding."""
        visible = jnp.where(self.kv_len > 0, self.end + self.position, 0)
        return lax.div(visible + (block_kv - 1), jnp.int32(block_kv))

    def whole_blocks(self, first_token: jax.Array, block_kv: int) -> jax.Array:
        """Blocks without a mask: every written token from `first_token` on sees all of their keys."""
        first = jnp.maximum(first_token, self.begin)
        return jnp.clip(lax.div(first + self.position + 1, jnp.int32(block_kv)), 0, self.num_blocks(block_kv))


def unit_of(round_: jax.Array, cta: jax.Array, num_ctas: int) -> jax.Array:
    """A persistent CTA's unit in a round. Rounds alternate in direction, so every CTA gets long and short units."""
    place = jnp.where(lax.rem(round_, jnp.int32(2)) == 0, cta, num_ctas - 1 - cta)
    return round_ * num_ctas + place


def causal_mask(
    shape: TileShape, tile: Tile, first_token: jax.Array, first_key: jax.Array, block_kv: int, layout: Any
) -> jax.Array:
    """True where a row of the 64 may see a key of the block: bool[64, block_kv]."""
    # One limit per row. Differences of indices would keep 64 registers occupied.
    row = plgpu.broadcasted_iota(jnp.int32, (TILE_M,), 0, layout=layout.reduce(1))
    last = lax.rem(row, jnp.int32(shape.tokens)) + (first_token + tile.position - first_key)
    key = plgpu.broadcasted_iota(jnp.int32, (TILE_M, block_kv), 1, layout=layout)
    return key <= lax.broadcast_in_dim(last, (TILE_M, block_kv), [0])


def head_columns(head: jax.Array, head_dim: int) -> Any:
    """The columns of a head in [T, N * H]."""
    return pl.ds(pl.multiple_of(head * head_dim, head_dim), head_dim)


def load_queries(q_ref, q_smem, shape: TileShape, tile: Tile, first_token, barrier=None) -> None:
    """Copies [tokens, H] of every head from [T, N * H] into its rows of the tile, asynchronously."""
    tokens = pl.ds(pl.multiple_of(first_token, TOKEN_ALIGNMENT), shape.tokens)
    for g in range(shape.heads):
        plgpu.copy_gmem_to_smem(
            q_ref.at[tokens, head_columns(tile.first_head + g, q_smem.shape[-1])],
            q_smem.at[pl.ds(g * shape.tokens, shape.tokens)],
            *(() if barrier is None else (barrier,)),
            oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
        )
