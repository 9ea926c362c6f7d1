"""The memory warpgroup of Hopper's prefill. It copies queries, keys and values to shared memory for the compute
warpgroups.

Pages in the type of the products are copied to the ring's tiles by TMA. Pages of 8 bits are first copied to separate
tiles, and this warpgroup converts them to the ring's tiles. In the meantime, the next copies run, and the compute
warpgroups multiply.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import conversion, matmul, prefill_tile
from pallas_kernels.gpu.prefill_body import PrefillBody
from pallas_kernels.gpu.prefill_tile import Tile
from pallas_kernels.gpu.ring import KEYS, VALUES, Source

COMPUTE_WARPGROUPS = 2
KV8_STAGES = 2  # blocks of 8 bits that are copied at a time
TAIL_ROWS = 16  # rows of V that are cleared at a time; few, to save registers


def queries_place(refs: Any, body: PrefillBody) -> Any:
    """The barrier at which both compute warpgroups release the queries' place.

    Its index is not a constant: ptxas would keep a constant address in a register of every warpgroup, from the start of
    the kernel.
    """
    return refs.met.at[lax.optimization_barrier(jnp.int32(2 * body.sizes.num_stages))]


class Memory:
    """The work of the memory warpgroup that does not depend on the type of the pages."""

    registers = 56  # registers of a thread of this warpgroup
    compute_registers = 224  # registers of a thread of the compute warpgroups

    def __init__(self, body: PrefillBody, refs: Any) -> None:
        self.body, self.refs = body, refs
        self.first_page = refs.first_page[0]
        self.q_free = queries_place(refs, body)

    def feed(self, tile: Tile, blocks_before: jax.Array) -> None:
        """Copies a tile's queries and all of its blocks. `blocks_before` blocks have gone through the ring before.

        The first block is copied before the queries. Its slot is free before the previous tile's last product has
        ended, and the queries' place is free only after that.
        """
        source = Source(
            shape=self.body.blocks, kv_ref=self.refs.kv_pages, pages_ref=self.refs.page_table,
            first_page=self.first_page, row=tile.row, kv_head=tile.kv_head,
        )  # fmt: skip
        self.start(source, tile, blocks_before)

        @pl.loop(0, jnp.maximum(tile.num_blocks, 1))
        def _(i: jax.Array) -> None:
            pl.when(i < tile.num_blocks)(lambda: self.feed_block(source, tile, i, blocks_before + i))
            pl.when(i == 0)(lambda: self.feed_queries(tile))

    def feed_queries(self, tile: Tile) -> None:
        """Copies the queries when their place is free."""
        body, refs = self.body, self.refs
        plgpu.barrier_wait(self.q_free)

        @pl.loop(0, COMPUTE_WARPGROUPS)
        def _(wg: Any) -> None:
            # The heads' places are computed here: no register holds them while blocks are copied.
            there = replace(tile, first_head=lax.optimization_barrier(tile.first_head))
            first_token = tile.token + wg * body.shape.tokens
            prefill_tile.load_queries(
                refs.queries, refs.q_smem.at[wg], body.shape, there, first_token, refs.q_arrived.at[wg]
            )

    def start(self, source: Source, tile: Tile, blocks_before: jax.Array) -> None:
        """Prepares a tile. `feed` calls it before the tile's first block."""

    def feed_block(self, source: Source, tile: Tile, i: jax.Array, index: jax.Array) -> None:
        """Copies keys and values of the tile's block number `i` to their slots when these are free. `index` blocks have
        gone through the ring before."""
        raise NotImplementedError

    def slot_of(self, index: jax.Array) -> Any:
        """The ring's slot for a block. `index` counts all blocks since the first tile."""
        return lax.rem(index, jnp.int32(self.body.sizes.num_stages))

    def fetch(self, source: Source, block: jax.Array, kind: int, smem: Any, barrier: Any) -> None:
        """Starts the copies of a block's keys or values to the tile `smem`."""
        for offset, *halves in source.parts(block):
            rows = pl.ds(offset, self.body.blocks.copy_tokens)
            plgpu.copy_gmem_to_smem(halves[kind], smem.at[rows], barrier, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)

    def drain(self, num_blocks: jax.Array) -> None:
        """Waits until the compute warpgroups have released all slots, so that each arrival has a wait."""
        stages = self.body.sizes.num_stages
        plgpu.barrier_wait(self.q_free)

        @pl.loop(jnp.maximum(num_blocks - stages, 0), num_blocks)
        def _(block: jax.Array) -> None:
            slot = lax.rem(block, jnp.int32(stages))
            plgpu.barrier_wait(self.refs.met.at[2 * slot])
            plgpu.barrier_wait(self.refs.met.at[2 * slot + 1])


class CopyingMemory(Memory):
    """The memory warpgroup for pages in the type of the products."""

    @staticmethod
    def scratch(body: PrefillBody) -> dict[str, Any]:
        """The barriers of the copies."""
        copies = body.blocks.copies
        return {
            "arrived": plgpu.Barrier(num_arrivals=copies, num_barriers=2 * body.sizes.num_stages),
            "tail_arrived": plgpu.Barrier(num_arrivals=copies),  # awaited by this warpgroup
        }

    def feed_block(self, source: Source, tile: Tile, i: jax.Array, index: jax.Array) -> None:
        """Copies keys and values of the tile's block number `i` to their slots when these are free."""
        body, refs = self.body, self.refs
        slot, block = self.slot_of(index), tile.first_block + i
        is_reused = index >= body.sizes.num_stages
        pl.when(is_reused)(lambda: plgpu.barrier_wait(refs.met.at[2 * slot]))
        self.fetch(source, block, KEYS, refs.k_smem.at[slot], refs.arrived.at[2 * slot])
        pl.when(is_reused)(lambda: plgpu.barrier_wait(refs.met.at[2 * slot + 1]))
        num_valid = tile.kv_len - block * body.sizes.block_kv

        @pl.when(num_valid >= body.sizes.block_kv)
        def _() -> None:
            self.fetch(source, block, VALUES, refs.v_smem.at[slot], refs.arrived.at[2 * slot + 1])

        @pl.when(num_valid < body.sizes.block_kv)
        def _() -> None:
            self.fetch(source, block, VALUES, refs.v_smem.at[slot], refs.tail_arrived)
            plgpu.barrier_wait(refs.tail_arrived)
            self.clear_tail(num_valid, slot)
            for _ in range(body.blocks.copies):
                plgpu.barrier_arrive(refs.arrived.at[2 * slot + 1])

    def clear_tail(self, num_valid: jax.Array, slot: jax.Array) -> None:
        """Sets the values after the sequence's last key to zero. They may be NaN, and 0 * NaN is NaN."""

        @pl.loop(lax.div(num_valid, jnp.int32(TAIL_ROWS)), self.body.sizes.block_kv // TAIL_ROWS)
        def _(part: jax.Array) -> None:
            first = pl.multiple_of(part * TAIL_ROWS, TAIL_ROWS)
            rows = self.refs.v_smem.at[slot, pl.ds(first, TAIL_ROWS)]
            layout = plgpu.Layout.MMA_ACC(self.body.dtype, m_warps=1)
            values = plgpu.load(rows, layout=layout, optimized=False)
            key = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=layout)
            rows[...] = jnp.where(key + first < num_valid, values, jnp.zeros_like(values))

        plgpu.commit_smem()


class ConvertingMemory(Memory):
    """The memory warpgroup for pages of 8 bits."""

    @staticmethod
    def scratch(body: PrefillBody) -> dict[str, Any]:
        """Tiles of keys and values as they are stored, and the barriers of their copies and of the ring."""
        shape = (2 * KV8_STAGES, body.sizes.block_kv, body.head_dim)
        swizzled = matmul.swizzled(body.head_dim, body.kv_dtype)
        return {
            "arrived": plgpu.Barrier(num_barriers=2 * body.sizes.num_stages),
            "kv8_smem": plgpu.SMEM(shape, body.kv_dtype, transforms=swizzled),
            "kv8_arrived": plgpu.Barrier(num_arrivals=body.blocks.copies, num_barriers=2 * KV8_STAGES),
        }

    def start(self, source: Source, tile: Tile, blocks_before: jax.Array) -> None:
        """Starts the copies of the tile's first blocks, as they are stored."""

        @pl.loop(0, jnp.minimum(tile.num_blocks, KV8_STAGES))
        def _(i: jax.Array) -> None:
            for kind in (KEYS, VALUES):
                self.fetch_kv8(source, tile.first_block + i, kind, blocks_before + i)

    def feed_block(self, source: Source, tile: Tile, i: jax.Array, index: jax.Array) -> None:
        """Converts keys and values of the tile's block number `i` to their slots, and starts the copies of a later
        block."""
        block, ahead = tile.first_block + i, KV8_STAGES
        for kind in (KEYS, VALUES):
            self.convert(block, kind, tile, index)
            fetch = partial(self.fetch_kv8, source, block + ahead, kind, index + ahead)
            pl.when(i + ahead < tile.num_blocks)(fetch)

    def kv8_place(self, kind: int, index: jax.Array) -> Any:
        """The index of the tile and of the barrier for a block's keys or values as they are stored."""
        return 2 * lax.rem(index, jnp.int32(KV8_STAGES)) + kind

    def fetch_kv8(self, source: Source, block: jax.Array, kind: int, index: jax.Array) -> None:
        """Starts the copies of a block's keys or values, as they are stored."""
        place = self.kv8_place(kind, index)
        self.fetch(source, block, kind, self.refs.kv8_smem.at[place], self.refs.kv8_arrived.at[place])

    def convert(self, block: jax.Array, kind: int, tile: Tile, index: jax.Array) -> None:
        """Converts a block's keys or values to their slot, when they have arrived and the slot is free."""
        refs, slot = self.refs, self.slot_of(index)
        place = self.kv8_place(kind, index)
        plgpu.barrier_wait(refs.kv8_arrived.at[place])
        pl.when(index >= self.body.sizes.num_stages)(lambda: plgpu.barrier_wait(refs.met.at[2 * slot + kind]))
        smem = refs.k_smem if kind == KEYS else refs.v_smem
        self.convert_tile(kind, place, smem, slot, tile.kv_len - block * self.body.sizes.block_kv)
        # Orders the reads before the next copy, and the writes before the others' products.
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs.arrived.at[2 * slot + kind])

    def convert_tile(self, kind: int, place: jax.Array, smem: Any, slot: jax.Array, num_valid: jax.Array) -> None:
        """Converts a tile. Values after the sequence's last key become zeros: they may be NaN, and 0 * NaN is NaN."""

        @pl.loop(0, self.body.sizes.block_kv // conversion.ROWS)
        def _(part: jax.Array) -> None:
            first = pl.multiple_of(part * conversion.ROWS, conversion.ROWS)
            rows = pl.ds(first, conversion.ROWS)
            values = conversion.load(self.refs.kv8_smem.at[place, rows], self.body.dtype)
            if kind == VALUES:
                key = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=conversion.LAYOUT)
                values = jnp.where(key + first < num_valid, values, jnp.zeros_like(values))
            smem[slot, rows] = values


def memory_of(body: PrefillBody) -> type[CopyingMemory] | type[ConvertingMemory]:
    """The class for the type of the body's pages."""
    return CopyingMemory if body.kv_dtype == body.dtype else ConvertingMemory
