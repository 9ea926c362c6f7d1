"""Copies of KV blocks from pages to SMEM tiles: the place of a block, and a ring of tiles that one warpgroup fills.

A block of `block_kv` keys is several pages, or a part of one. From Hopper on a copy is one TMA box per page, which
arrives at a barrier. Below, all threads copy by cp.async and count the copies that they have issued.

TMA accesses shared memory through the async proxy, threads through the generic proxy. Waiting for a copy's barrier
orders the threads' reads after the copy. The other direction needs a fence: after threads have read (ldmatrix) or
written a tile, TMA may write to it once those threads have executed a proxy fence and met at a barrier.
`plgpu.commit_smem` does both. cp.async belongs to the generic proxy, where the barrier that Mosaic puts in front of
every copy is enough.

Source: PTX ISA, "Async proxy" and "Memory Consistency Model".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import conversion

KEYS, VALUES = 0, 1  # on the second axis of the pages


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """The static sizes of a block's copies."""

    block_kv: int
    page_size: int
    pages_per_seq: int

    @property
    def copies(self) -> int:
        """The number of copies of one block of keys, which is also that of one block of values."""
        return max(1, self.block_kv // self.page_size)

    @property
    def copy_tokens(self) -> int:
        """The number of tokens of one copy."""
        return min(self.page_size, self.block_kv)


@dataclass(frozen=True, kw_only=True)
class Source:
    """One sequence's keys and values for one KV head, in pages."""

    shape: BlockShape
    kv_ref: Any  # [P, 2, K, page, H]
    pages_ref: Any  # i32[S, pages_per_seq]
    first_page: Any
    row: Any
    kv_head: Any

    def parts(self, block: Any) -> Iterator[tuple[int, Any, Any]]:
        """The copies of a block: its first token's place in the tile, and the keys and values [copy_tokens, H]."""
        shape = self.shape
        size, page_size = shape.copy_tokens, jnp.int32(shape.page_size)
        for j in range(shape.copies):
            token = block * shape.block_kv + j * size
            # A block may reach past the table's last page. Any page is valid there: its keys are masked.
            index = jnp.minimum(lax.div(token, page_size), shape.pages_per_seq - 1)
            page = self.first_page + self.pages_ref[self.row, index]
            halves = [self.kv_ref.at[page, kind, self.kv_head] for kind in (KEYS, VALUES)]
            if shape.page_size > size:
                inside = pl.ds(pl.multiple_of(lax.rem(token, page_size), size), size)
                halves = [half.at[inside] for half in halves]
            yield j * size, *halves


@dataclass(frozen=True, kw_only=True)
class Following:
    """The first block of the next run, which uses the same tiles."""

    row: Any
    kv_head: Any
    block: Any
    exists: Any  # if not, the other fields are those of some block


@dataclass(frozen=True, kw_only=True)
class Ring:
    """The tiles through which a run of blocks passes. Copies start `num_stages - 1` blocks before their use.

    Runs may follow one another. When a run uses its last block, it starts the copy of the first block of the next run,
    and that run does not start this copy again. This needs two stages, and at least one block in every run.
    """

    source: Source
    first_block: Any
    num_blocks: Any
    num_stages: int
    k_smem: Any  # [stages, block_kv, H]
    v_smem: Any
    arrived: Any  # barriers, 2 * copies arrivals each; None: cp.async
    k_converted: Any = None  # [block_kv, H], for blocks of 8-bit keys and values
    v_converted: Any = None
    blocks_before: Any = 0  # blocks of earlier runs
    following: Following | None = None

    def fill(self) -> None:
        """Starts the copies of the first blocks."""
        for i in range(self.num_stages - 1):
            self._prefetch(jnp.int32(i), i)

    def advance(self, i: Any) -> Any:
        """Waits for block `i` of the run and returns its slot; starts a copy into the slot of block `i - 1`."""
        slot = self._slot(i)
        if self.arrived is None:
            plgpu.wait_gmem_to_smem((self.num_stages - 2) * 2 * self.source.shape.copies)
        else:
            plgpu.barrier_wait(self.arrived.at[slot])
            plgpu.commit_smem()  # orders the threads' reads of the previous block before the copy into its slot
        ahead = i + self.num_stages - 1
        self._prefetch(ahead, self._slot(ahead))
        return slot

    def tiles(self, slot: Any) -> tuple[Any, Any]:
        """The keys and values of the block in `slot`, [block_kv, H] each, in the type of the products."""
        keys, values = self.k_smem.at[slot], self.v_smem.at[slot]
        if self.k_converted is None:
            return keys, values
        return conversion.convert(keys, self.k_converted), conversion.convert(values, self.v_converted)

    def drain(self) -> None:
        """Waits for all copies. The tiles may then be used for something else."""
        if self.arrived is None:
            plgpu.wait_gmem_to_smem(0)

    def _slot(self, i: Any) -> Any:
        return lax.rem(self.blocks_before + i, jnp.int32(self.num_stages))

    def _prefetch(self, i: Any, slot: Any) -> None:
        source, block, exists = self.source, self.first_block + i, i < self.num_blocks
        if self.following is not None:
            assert self.num_stages == 2
            row = jnp.where(exists, source.row, self.following.row)
            source = replace(source, row=row, kv_head=jnp.where(exists, source.kv_head, self.following.kv_head))
            block = jnp.where(exists, block, self.following.block)
            exists = exists | self.following.exists
        elif self.arrived is None:
            # cp.async counts copies, and the count must not depend on data: the last block is copied again.
            block = self.first_block + jnp.minimum(i, jnp.maximum(self.num_blocks - 1, 0))
        if self.arrived is None:
            self._fetch(source, block, slot)
        else:
            pl.when(exists)(lambda: self._fetch(source, block, slot))

    def _fetch(self, source: Source, block: Any, slot: Any) -> None:
        barrier = () if self.arrived is None else (self.arrived.at[slot],)
        for offset, keys, values in source.parts(block):
            rows = pl.ds(offset, source.shape.copy_tokens)
            for half, smem in ((keys, self.k_smem), (values, self.v_smem)):
                plgpu.copy_gmem_to_smem(
                    half, smem.at[slot, rows], *barrier, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS
                )
