"""Prefill on Hopper: ragged causal chunks against their pages, warp-specialised, on wgmma.

A persistent CTA per multiprocessor takes tiles from the list. One warpgroup feeds the ring of K and V tiles by TMA. Two
others multiply 64 rows each and take turns at the tensor cores, so that one's softmax runs during the other's products.

Source of the algorithm: Shah et al., FlashAttention-3 (2024).

Interpret mode does not check wgmma (plain products replace it, without its asynchrony), fragment layouts, swizzles, the
alignment that TMA needs and `set_max_registers`. It finds no races between CTAs, because it runs them one after
another. It does find missing waits, slots released too early, missing fences before copies out, and wrong masks. A
fault that leaves a warpgroup waiting may hang it instead of being reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import matmul, online_softmax, prefill_tile
from pallas_kernels.gpu.prefill_body import PrefillBody, PrefillOperands, PrefillRefs
from pallas_kernels.gpu.prefill_tile import TILE_M, Tile
from pallas_kernels.gpu.ring import KEYS, VALUES, Source

COMPUTE_WARPGROUPS = 2
COMPUTE_REGISTERS, MEMORY_REGISTERS = 232, 40
TAIL_ROWS = 16  # of V that the memory warpgroup clears at a time: few registers


@dataclass(frozen=True, kw_only=True)
class PrefillTiles:
    """The ring's tiles, of K and of V."""

    block_kv: int  # keys per step of the loop
    num_stages: int


def prefill(
    output: Any, operands: PrefillOperands, *, scale: float, sizes: PrefillTiles, num_ctas: int, interpret: Any = None
) -> None:
    """Writes the rows of the list's tiles to `output`, a Ref [T, N * H], in place."""
    body = _Body.of(operands, scale=scale, sizes=sizes, num_ctas=num_ctas, interpret=interpret)
    blocks, head_dim, dtype = body.blocks, body.head_dim, body.dtype
    ring = plgpu.SMEM((sizes.num_stages, sizes.block_kv, head_dim), dtype, transforms=matmul.swizzled(head_dim, dtype))
    stages = sizes.num_stages
    plgpu.kernel(
        body,
        out_type=(),
        scratch_types={
            "q_smem": plgpu.SMEM(
                (COMPUTE_WARPGROUPS, TILE_M, head_dim), dtype, transforms=matmul.swizzled(head_dim, dtype)
            ),
            "out_smem": plgpu.SMEM((COMPUTE_WARPGROUPS, TILE_M, head_dim), dtype),
            "k_smem": ring,
            "v_smem": ring,
            "q_arrived": plgpu.Barrier(num_arrivals=body.shape.heads, num_barriers=COMPUTE_WARPGROUPS),
            "arrived": plgpu.Barrier(num_arrivals=blocks.copies, num_barriers=2 * stages),
            "tail_arrived": plgpu.Barrier(num_arrivals=blocks.copies),  # awaited by the memory warpgroup
            # Both compute warpgroups arrive at these: one for each K and V slot, one for the queries' place, one for
            # the turns.
            "met": plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=2 * stages + 2),
        },
        grid=(num_ctas,),
        grid_names=("cta",),
        num_threads=COMPUTE_WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="paged_prefill",
    )(*operands, output)


@dataclass(frozen=True)
class _Refs(PrefillRefs):
    q_smem: Any  # [warpgroups, 64, H]
    out_smem: Any  # [warpgroups, 64, H]
    k_smem: Any  # [stages, block_kv, H]
    v_smem: Any
    q_arrived: Any  # barriers, one per compute warpgroup
    arrived: Any  # barriers, alternately of K and of V of each stage
    tail_arrived: Any  # barrier
    met: Any  # barriers, see `prefill`


class _Body(PrefillBody):
    def __call__(self, *arrays: Any, **scratch: Any) -> None:
        refs = _Refs(*arrays, **scratch)
        warpgroup = lax.axis_index("warpgroup")
        cta = lax.axis_index("cta")

        def for_each_tile(do):
            """Calls `do(tile, blocks so far)` for every unit of this CTA; returns the blocks of all of them."""
            units = refs.num_tiles[0] * (self.num_kv_heads * self.shape.tiles_per_group)
            rounds = lax.div(units + (self.num_ctas - 1), jnp.int32(self.num_ctas))

            def one(round_, num_blocks):
                unit = prefill_tile.unit_of(round_, cta, self.num_ctas)
                tile = Tile.read(refs.tiles, jnp.minimum(unit, units - 1), self.shape, self.num_kv_heads)
                pl.when(unit < units)(lambda: do(tile, num_blocks))
                return num_blocks + jnp.where(unit < units, tile.num_blocks(self.sizes.block_kv), 0)

            return lax.fori_loop(0, rounds, one, jnp.int32(0))

        @pl.when(warpgroup < COMPUTE_WARPGROUPS)
        def _():
            compute = _Compute(self, refs, warpgroup)
            plgpu.barrier_arrive(compute.q_free)  # the queries' place is free at the start
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            for_each_tile(compute.attend)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == COMPUTE_WARPGROUPS)
        def _():
            plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")
            memory = _Memory(self, refs)
            memory.drain(for_each_tile(memory.feed))


class _Compute:
    """One of the two compute warpgroups."""

    def __init__(self, body: _Body, refs: _Refs, warpgroup) -> None:
        self.body, self.out_ref, self.warpgroup = body, refs.out, warpgroup
        self.q_smem, self.out_smem = refs.q_smem.at[warpgroup], refs.out_smem.at[warpgroup]
        self.k_smem, self.v_smem = refs.k_smem, refs.v_smem
        self.q_arrived = refs.q_arrived.at[warpgroup]
        self.arrived, self.met = refs.arrived, refs.met
        stages = body.sizes.num_stages
        self.q_free, self.turn = self.met.at[2 * stages], self.met.at[2 * stages + 1]

    def take_turn(self) -> None:
        """Waits for the other warpgroup. One of them starts half a step later, so they alternate."""
        plgpu.barrier_arrive(self.turn)
        plgpu.barrier_wait(self.turn)

    def attend(self, tile: Tile, blocks_before) -> None:
        body, layout = self.body, plgpu.Layout.WGMMA
        first_token = tile.token + self.warpgroup * body.shape.tokens
        num_blocks = tile.num_blocks(body.sizes.block_kv)
        whole = tile.whole_blocks(first_token, body.sizes.block_kv)
        plgpu.barrier_wait(self.q_arrived)
        pl.when(self.warpgroup == 1)(self.take_turn)
        carry = online_softmax.start(TILE_M, body.head_dim, layout, lowest=prefill_tile.MASKED)

        def step(i, carry, *, masked):
            return self.step(i, carry, tile, first_token, blocks_before, masked)

        carry = lax.fori_loop(0, whole, lambda i, c: step(i, c, masked=False), carry)
        acc, _, total = lax.fori_loop(whole, num_blocks, lambda i, c: step(i, c, masked=True), carry)
        pl.when(self.warpgroup == 0)(self.take_turn)
        plgpu.barrier_arrive(self.q_free)
        self.store(tile, first_token, online_softmax.finish(acc, total)[0])

    def step(self, i, carry, tile: Tile, first_token, blocks_before, masked: bool):
        body = self.body
        block_kv = body.sizes.block_kv
        acc, peak, total = carry
        slot = lax.rem(blocks_before + i, jnp.int32(body.sizes.num_stages))
        plgpu.barrier_wait(self.arrived.at[2 * slot])
        scores = matmul.wgmma_scores(
            self.q_smem, self.k_smem.at[slot], while_running=self.take_turn, interpret=body.interpret
        )
        plgpu.barrier_arrive(self.met.at[2 * slot])
        if masked:
            mask = prefill_tile.causal_mask(body.shape, tile, first_token, i * block_kv, block_kv, plgpu.Layout.WGMMA)
            scores = jnp.where(mask, scores, -jnp.inf)
        p, alpha, new_peak, total = online_softmax.step(scores, peak, total, body.scale_log2)
        acc = online_softmax.scaled(acc, alpha)
        p16 = p.astype(body.dtype)
        if body.interpret is None:  # keep the softmax on this side of the turn
            acc, total, new_peak, p16 = lax.optimization_barrier((acc, total, new_peak, p16))
        plgpu.barrier_arrive(self.turn)
        plgpu.barrier_wait(self.arrived.at[2 * slot + 1])
        plgpu.barrier_wait(self.turn)
        acc = matmul.wgmma_accumulate(acc, p16, self.v_smem.at[slot], interpret=body.interpret)
        plgpu.barrier_arrive(self.met.at[2 * slot + 1])
        return acc, new_peak, total

    def store(self, tile: Tile, first_token, acc) -> None:
        """Writes the rows of the tile's own tokens, in powers of two: TMA boxes have static sizes."""
        shape = self.body.shape
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the previous tile has left the buffer
        self.out_smem[...] = acc.astype(self.body.dtype)
        plgpu.commit_smem()
        begin = jnp.maximum(tile.begin - first_token, 0)
        count = jnp.maximum(jnp.minimum(tile.end - first_token, shape.tokens) - begin, 0)
        size = shape.tokens
        while size:
            start = begin + lax.div(count, jnp.int32(2 * size)) * (2 * size)

            @pl.when(lax.rem(lax.div(count, jnp.int32(size)), jnp.int32(2)) == 1)
            def _(start=start, size=size):
                for g in range(shape.heads):
                    columns = prefill_tile.head_columns(tile.first_head + g, self.body.head_dim)
                    plgpu.copy_smem_to_gmem(
                        self.out_smem.at[pl.ds(g * shape.tokens + start, size)],
                        self.out_ref.at[pl.ds(first_token + start, size), columns],
                    )

            size //= 2


class _Memory:
    """The warpgroup that loads queries, keys and values for the others."""

    def __init__(self, body: _Body, refs: _Refs) -> None:
        self.body, self.refs = body, refs
        self.first_page = refs.first_page[0]
        self.q_free = refs.met.at[2 * body.sizes.num_stages]

    def feed(self, tile: Tile, blocks_before) -> None:
        body, refs = self.body, self.refs
        plgpu.barrier_wait(self.q_free)

        @pl.loop(0, COMPUTE_WARPGROUPS)
        def _(wg):
            first_token = tile.token + wg * body.shape.tokens
            prefill_tile.load_queries(
                refs.queries, refs.q_smem.at[wg], body.shape, tile, first_token, refs.q_arrived.at[wg]
            )

        source = Source(
            shape=body.blocks, kv_ref=refs.kv_pages, pages_ref=refs.page_table, first_page=self.first_page,
            row=tile.row, kv_head=tile.kv_head,
        )  # fmt: skip

        @pl.loop(0, tile.num_blocks(body.sizes.block_kv))
        def _(i):
            slot = lax.rem(blocks_before + i, jnp.int32(body.sizes.num_stages))
            is_reused = blocks_before + i >= body.sizes.num_stages
            pl.when(is_reused)(lambda: plgpu.barrier_wait(refs.met.at[2 * slot]))
            self.fetch(source, i, KEYS, slot, refs.arrived.at[2 * slot])
            pl.when(is_reused)(lambda: plgpu.barrier_wait(refs.met.at[2 * slot + 1]))
            num_valid = tile.kv_len - i * body.sizes.block_kv

            @pl.when(num_valid >= body.sizes.block_kv)
            def _():
                self.fetch(source, i, VALUES, slot, refs.arrived.at[2 * slot + 1])

            @pl.when(num_valid < body.sizes.block_kv)
            def _():
                self.fetch(source, i, VALUES, slot, refs.tail_arrived)
                plgpu.barrier_wait(refs.tail_arrived)
                self.clear_tail(num_valid, slot)
                for _ in range(body.blocks.copies):
                    plgpu.barrier_arrive(refs.arrived.at[2 * slot + 1])

    def fetch(self, source: Source, block, kind: int, slot, barrier) -> None:
        smem = self.refs.k_smem if kind == KEYS else self.refs.v_smem
        for offset, *halves in source.parts(block):
            rows = pl.ds(offset, self.body.blocks.copy_tokens)
            plgpu.copy_gmem_to_smem(
                halves[kind], smem.at[slot, rows], barrier, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS
            )

    def clear_tail(self, num_valid, slot) -> None:
        """Zeroes the values after the sequence's last key. They may hold anything, and 0 * NaN is NaN."""

        @pl.loop(lax.div(num_valid, jnp.int32(TAIL_ROWS)), self.body.sizes.block_kv // TAIL_ROWS)
        def _(part):
            first = pl.multiple_of(part * TAIL_ROWS, TAIL_ROWS)
            rows = self.refs.v_smem.at[slot, pl.ds(first, TAIL_ROWS)]
            layout = plgpu.Layout.MMA_ACC(self.body.dtype, m_warps=1)
            values = plgpu.load(rows, layout=layout, optimized=False)
            key = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=layout)
            rows[...] = jnp.where(key + first < num_valid, values, jnp.zeros_like(values))

        plgpu.commit_smem()

    def drain(self, num_blocks) -> None:
        """Waits until the other warpgroups have released all slots, so no arrival is left without a wait."""
        stages = self.body.sizes.num_stages
        plgpu.barrier_wait(self.q_free)

        @pl.loop(jnp.maximum(num_blocks - stages, 0), num_blocks)
        def _(block):
            slot = lax.rem(block, jnp.int32(stages))
            plgpu.barrier_wait(self.refs.met.at[2 * slot])
            plgpu.barrier_wait(self.refs.met.at[2 * slot + 1])
