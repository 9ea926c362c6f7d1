"""The units of one KV block of one query block in the mixed kernel, and the mask of each.

A unit is (plane, tile of queries, tile of tokens), and units are computed in this order. Units in which no query sees a
token are left out.

An example: a prompt's first 512 queries against its first 512 tokens, tiles of 256 by 256. Of each plane's four units
three remain: queries 0-255 see tokens 0-255 only (the diagonal, masked), queries 256-511 see all of tokens 0-255, and
tokens 256-511 masked. Eight planes make 24 units, computed `units_per_turn` at a time.

A block of no more than 64 of those queries takes narrow tiles of 64 instead: a unit then has those of four planes,
which fill the same buffers, so the compiler finds as much to do at the same time.

A unit's mask depends only on its distance, the positions from its first token to its first query: `position + q_tile *
queries - kv_tile * tokens`. At `tokens - 1` or more nothing is masked, and at `-queries` everything is. Tiles and
blocks are powers of two, so all distances of one query block have the same remainder by the smaller tile, its phase (by
the tile of tokens, if it has one tile of queries). Few distances lie between the two limits, and masks are computed
again only if the phase changes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels.tpu.layout import LANES, Geometry

SLICE_ROWS = 256  # the columns of the largest matrix unit
NARROW_UNITS = 4  # in one turn, at most: the loop is there twice
POWERS_OF_TWO = [1 << n for n in range(8)]
REGISTER_ROWS = 16  # rows of a register of bf16


@dataclass(frozen=True, kw_only=True)
class Slice:
    """Query rows of a unit that are computed at a time."""

    plane: int  # counted from the unit's first
    rows: slice  # of the plane's tile of queries
    columns: slice  # of the buffers that hold one unit


@dataclass(frozen=True, kw_only=True)
class MixedBlocks:
    """Powers of two, in tokens except where a comment says otherwise."""

    q_block: int  # queries of one query block: a multiple of a tile
    kv_block: int  # fetched at a time
    tile_rows: int  # query rows of a unit: a power of two of queries, times the queries per plane
    tile_tokens: int  # KV tokens of a unit: at most kv_block
    units_per_turn: int  # even: units in one turn of the loop

    def tile_queries(self, g: Geometry) -> int:
        """Queries of one tile. Raises ValueError if their number is not a power of two."""
        queries, rest = divmod(self.tile_rows, g.queries_per_plane)
        if rest or queries & (queries - 1):
            raise ValueError(f"a tile holds a power of two of queries: {self.tile_rows=} {g.queries_per_plane=}")
        return queries

    def max_q_tiles(self, g: Geometry) -> int:
        """Tiles of a whole block of queries."""
        return self.q_block // self.tile_queries(g)

    def narrow(self, g: Geometry) -> NarrowBlocks | None:
        """The sizes for blocks with no more queries than fill one slice, in the buffers of these; None if these are no
        larger."""
        queries = next(n for n in POWERS_OF_TWO if n * g.queries_per_plane % LANES == 0)
        while queries * g.queries_per_plane < SLICE_ROWS:
            queries *= 2
        if queries >= self.tile_queries(g) or queries < g.token_tile:
            return None
        sizes = NarrowBlocks(
            q_block=queries,
            kv_block=self.kv_block,
            tile_rows=queries * g.queries_per_plane,
            tile_tokens=self.tile_tokens,
            units_per_turn=self.units_per_turn,
            buffer_rows=self.tile_rows,
        )
        return replace(sizes, units_per_turn=min(self.units_per_turn, NARROW_UNITS))

    def planes_of_unit(self, g: Geometry) -> int:
        """Planes that a unit has a tile of queries of."""
        return 1

    def slices(self, g: Geometry) -> list[Slice]:
        """The parts of a unit, which are computed one after the other."""
        return [
            Slice(
                plane=plane,
                rows=slice(begin, begin + self.slice_rows),
                columns=slice(plane * self.tile_rows + begin, plane * self.tile_rows + begin + self.slice_rows),
            )
            for plane in range(self.planes_of_unit(g))
            for begin in range(0, self.tile_rows, self.slice_rows)
        ]

    @property
    def slice_rows(self) -> int:
        """Query rows computed at a time."""
        return SLICE_ROWS if self.tile_rows % SLICE_ROWS == 0 else LANES

    def mask_rows(self, g: Geometry) -> int:
        """Query rows of a mask: whole slices, after which the tile's queries repeat."""
        return max(self.tile_queries(g), self.slice_rows)

    def mask_step(self, g: Geometry) -> int:
        """The difference between consecutive distances of the units of one query block."""
        queries = self.tile_queries(g)
        return self.tile_tokens if self.q_block == queries else min(queries, self.tile_tokens)

    def mask_key(self, g: Geometry) -> int:
        """Added to a phase, it tells these sizes' masks from those of other tiles."""
        return self.tile_queries(g) * self.tile_tokens

    def num_masks(self, g: Geometry) -> int:
        """The most masks that the units of one query block need; number 0 masks nothing."""
        return 1 + -(-(self.tile_queries(g) + self.tile_tokens - 2) // self.mask_step(g))


@dataclass(frozen=True, kw_only=True)
class NarrowBlocks(MixedBlocks):
    """The sizes of `MixedBlocks.narrow`: units have the queries of several planes, side by side in the buffers."""

    buffer_rows: int  # query rows that the buffers hold

    def planes_of_unit(self, g: Geometry) -> int:
        """The most that the buffers hold, and that the number of planes is a multiple of."""
        return max(n for n in range(1, self.buffer_rows // self.tile_rows + 1) if g.num_k_planes % n == 0)


@dataclass(frozen=True, kw_only=True)
class FewBlocks:
    """The sizes for rows of few queries, see `spec_decode`. Powers of two, in tokens."""

    q_block: int  # queries of one query block: whole tiles of the step's tokens
    kv_block: int  # fetched at a time
    tile_tokens: int  # KV tokens computed on at a time: at most kv_block
    slots: int  # queries of a row computed at a time: 4, 8 or 16

    @property
    def max_chunks(self) -> int:
        """The most chunks of `slots` queries in a block of queries."""
        return self.q_block // self.slots

    def planes_per_group(self, g: Geometry) -> int:
        """Planes whose K and V are multiplied together: two fill the largest matrix unit."""
        return 2 if g.num_k_planes % 2 == 0 else 1

    def group_rows(self, g: Geometry) -> int:
        """Query rows of a group of planes: for each plane its query heads, for each head its slots; whole registers."""
        rows = self.planes_per_group(g) * g.queries_per_plane * self.slots
        return -(-rows // REGISTER_ROWS) * REGISTER_ROWS


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """The units of one KV block of one query block."""

    queries: int  # queries of one tile
    tokens: int  # tokens of one tile
    num_planes: int  # groups of planes, each of which a unit takes together
    max_q_tiles: int
    max_kv_tiles: int
    mask_step: int  # the difference between consecutive distances
    num_q: Any  # live queries
    position: Any  # of the first query, counted from the KV block's first token; may be negative

    @staticmethod
    def of(g: Geometry, blocks: MixedBlocks, *, num_q: Any, position: Any) -> Tiles:
        """The units for these block sizes; see the fields, and `entries.Entry`."""
        return Tiles(
            queries=blocks.tile_queries(g),
            tokens=blocks.tile_tokens,
            num_planes=g.num_k_planes // blocks.planes_of_unit(g),
            max_q_tiles=blocks.max_q_tiles(g),
            max_kv_tiles=blocks.kv_block // blocks.tile_tokens,
            mask_step=blocks.mask_step(g),
            num_q=num_q,
            position=position,
        )

    def num_seen(self, q_tile: Any) -> Any:
        """The number of token tiles, from the first one on, that some query of the tile sees."""
        end = self.position + jnp.minimum((q_tile + 1) * self.queries, self.num_q)
        seen = lax.div(jnp.maximum(end, 0) + (self.tokens - 1), self.tokens)
        return jnp.where(q_tile * self.queries < self.num_q, jnp.minimum(seen, self.max_kv_tiles), 0)

    @property
    def count(self) -> Any:
        """The number of units."""
        return self.num_planes * sum(self.num_seen(t) for t in range(self.max_q_tiles))

    @property
    def first(self) -> tuple[Any, Any, Any]:
        """The first unit."""
        return jnp.int32(0), self._first_q_tile, jnp.int32(0)

    @property
    def _first_q_tile(self) -> Any:
        return lax.div(jnp.maximum(-self.position, 0), self.queries)

    def after(self, unit: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        """The next unit; after the last one, units of planes that do not exist."""
        plane, q_tile, kv_tile = unit
        tile_ends = kv_tile + 1 >= self.num_seen(q_tile)
        plane_ends = tile_ends & ((q_tile + 1) * self.queries >= self.num_q)
        return (
            jnp.where(plane_ends, plane + 1, plane),
            jnp.where(plane_ends, self._first_q_tile, jnp.where(tile_ends, q_tile + 1, q_tile)),
            jnp.where(tile_ends, 0, kv_tile + 1),
        )

    @property
    def mask_phase(self) -> Any:
        """The same for all units of a query block; query blocks of one phase have the same masks."""
        return lax.rem(self.position + (self.max_q_tiles * self.queries - 1), self.mask_step)  # never negative

    def mask(self, q_tile: Any, kv_tile: Any) -> Any:
        """The number of the mask that a unit needs."""
        distance = self.position + q_tile * self.queries - kv_tile * self.tokens
        number = 1 + lax.div(jnp.maximum(distance + (self.queries - 1), 0), self.mask_step)
        return jnp.where(distance >= self.tokens - 1, 0, number)

    def distance(self, mask: Any) -> Any:
        """The distance of the units that need mask number `mask`, which is at least 1."""
        return (mask - 1) * self.mask_step - (self.queries - 1) + self.mask_phase
