"""Prefill on Hopper: ragged causal chunks against their pages, warp-specialised, on wgmma.

A persistent CTA per multiprocessor takes tiles from the list. One warpgroup (`prefill_memory`) feeds the ring of K and
V tiles. Two others multiply 64 rows each and take turns at the tensor cores, so that one's softmax runs during the
other's products.

Source of the algorithm: Shah et al., FlashAttention-3 (2024).

Interpret mode does not check wgmma (plain products replace it, without its asynchrony), fragment layouts, swizzles, the
alignment that TMA needs and `set_max_registers`. It finds no races between CTAs, because it runs them one after
another. It does find missing waits, slots released too early, missing fences before copies out, and wrong masks. A
fault that leaves a warpgroup waiting may hang it instead of being reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import matmul, online_softmax, persistent, prefill_tile, vector
from pallas_kernels.gpu.parts import NO_PARTS, Parts
from pallas_kernels.gpu.prefill_body import PrefillBody, PrefillOperands, PrefillRefs, results
from pallas_kernels.gpu.prefill_memory import COMPUTE_WARPGROUPS, memory_of
from pallas_kernels.gpu.prefill_tile import TILE_M, Tile
from pallas_kernels.gpu.tile_list import TOKEN_ALIGNMENT


@dataclass(frozen=True, kw_only=True)
class PrefillTiles:
    """The ring's tiles, of K and of V."""

    block_kv: int  # keys per step of the loop
    num_stages: int


def prefill(
    output: Any | None,
    operands: PrefillOperands,
    *,
    scale: float,
    sizes: PrefillTiles,
    num_ctas: int,
    parts: Parts = NO_PARTS,
    interpret: Any = None,
) -> tuple[jax.Array, ...]:
    """Writes the rows of the list's tiles to `output`, a Ref [T, N * H], in place. Returns the output, if `output` is
    None, and the results of the tiles that are parts: see `prefill_body.results`."""
    body = _Body.of(operands, scale=scale, sizes=sizes, num_ctas=num_ctas, interpret=interpret)
    head_dim, dtype = body.head_dim, body.dtype
    swizzled = matmul.swizzled(head_dim, dtype)
    ring = plgpu.SMEM((sizes.num_stages, sizes.block_kv, head_dim), dtype, transforms=swizzled)
    stages = sizes.num_stages
    scratch: dict[str, Any] = {
        "q_smem": plgpu.SMEM((COMPUTE_WARPGROUPS, TILE_M, head_dim), dtype, transforms=swizzled),
        "out_smem": plgpu.SMEM((COMPUTE_WARPGROUPS, TILE_M, head_dim), dtype),
        "k_smem": ring,
        "v_smem": ring,
        "q_arrived": plgpu.Barrier(num_arrivals=body.shape.heads, num_barriers=COMPUTE_WARPGROUPS),
        **memory_of(body).scratch(body),
        # Both compute warpgroups arrive at these: one for each K and V slot, one for the queries' place, one for the
        # turns.
        "met": plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=2 * stages + 2),
    }
    return plgpu.kernel(
        body,
        out_type=results(body, operands, output is None, parts, COMPUTE_WARPGROUPS),
        scratch_types=scratch,
        grid=(num_ctas,),
        grid_names=("cta",),
        num_threads=COMPUTE_WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="paged_prefill",
    )(*operands, *([] if output is None else [output]))


@dataclass(frozen=True, kw_only=True)
class _Refs(PrefillRefs):
    q_smem: Any  # [warpgroups, 64, H]
    out_smem: Any  # [warpgroups, 64, H]
    k_smem: Any  # [stages, block_kv, H]
    v_smem: Any
    q_arrived: Any  # barriers, one per compute warpgroup
    arrived: Any  # barriers, alternately of K and of V of each stage
    met: Any  # barriers, see `prefill`
    tail_arrived: Any = None  # barrier, see `prefill_memory.CopyingMemory`
    narrow_smem: Any = None  # [2, block_kv, H], of K and of V, see `prefill_memory.WideningMemory`
    narrow_arrived: Any = None  # barriers


class _Body(PrefillBody):
    def __call__(self, *arrays: Any, **scratch: Any) -> None:
        refs, kind = _Refs(*arrays, **scratch), memory_of(self)
        warpgroup = lax.axis_index("warpgroup")
        cta = lax.axis_index("cta")

        def for_each_tile(do):
            """Calls `do(tile, blocks so far)` for every unit of this CTA; returns the blocks of all of them."""
            units = refs.num_tiles[0] * (self.num_kv_heads * self.shape.tiles_per_group)
            rounds = persistent.rounds(units, self.num_ctas)

            def one(round_, num_blocks):
                unit = persistent.unit_of(round_, cta, self.num_ctas)
                tile = Tile.read(refs.tiles, jnp.minimum(unit, units - 1), self.shape, self.num_kv_heads)
                pl.when(unit < units)(lambda: do(tile, num_blocks))
                return num_blocks + jnp.where(unit < units, tile.num_blocks, 0)

            return lax.fori_loop(0, rounds, one, jnp.int32(0))

        @pl.when(warpgroup < COMPUTE_WARPGROUPS)
        def _():
            compute = _Compute(self, refs, warpgroup)
            plgpu.barrier_arrive(compute.q_free)  # the queries' place is free at the start
            plgpu.set_max_registers(kind.compute_registers, action="increase")
            for_each_tile(compute.attend)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == COMPUTE_WARPGROUPS)
        def _():
            plgpu.set_max_registers(kind.registers, action="decrease")
            memory = kind(self, refs)
            memory.drain(for_each_tile(memory.feed))


class _Compute:
    """One of the two compute warpgroups."""

    def __init__(self, body: _Body, refs: _Refs, warpgroup) -> None:
        self.body, self.refs, self.warpgroup = body, refs, warpgroup
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
        first_masked = tile.masked_from(first_token, body.sizes.block_kv)
        plgpu.barrier_wait(self.q_arrived)
        pl.when(self.warpgroup == 1)(self.take_turn)
        carry = online_softmax.start(TILE_M, body.head_dim, layout)

        def step(i, carry, *, masked):
            return self.step(i, carry, tile, first_token, blocks_before, masked)

        carry = lax.fori_loop(tile.first_block, first_masked, lambda i, c: step(i, c, masked=False), carry)
        carry = lax.fori_loop(first_masked, tile.end_block, lambda i, c: step(i, c, masked=True), carry)
        pl.when(self.warpgroup == 0)(self.take_turn)
        plgpu.barrier_arrive(self.q_free)
        self.store(tile, first_token, *online_softmax.finish(*carry))

    def step(self, i, carry, tile: Tile, first_token, blocks_before, masked: bool):
        body = self.body
        block_kv = body.sizes.block_kv
        acc, peak, total = carry
        slot = lax.rem(blocks_before + (i - tile.first_block), jnp.int32(body.sizes.num_stages))
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

    def store(self, tile: Tile, first_token, acc, sums) -> None:
        """Writes the result of the tile's own tokens, to the output or, of a part, to the partial results."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the previous tile has left the buffer
        self.out_smem[...] = acc.astype(self.body.dtype)
        plgpu.commit_smem()
        if self.refs.partial is None:
            self.store_output(tile, first_token)
            return
        pl.when(tile.part < 0)(lambda: self.store_output(tile, first_token))

        @pl.when(tile.part >= 0)
        def _():
            self.refs.sums[tile.heads, pl.ds(self.warpgroup * TILE_M, TILE_M), tile.part] = sums
            self.store_part(tile, first_token)

    def store_output(self, tile: Tile, first_token) -> None:
        """Writes the rows of the tile's own tokens, in powers of two: TMA boxes have static sizes."""
        shape = self.body.shape
        begin = jnp.maximum(tile.begin - first_token, 0)
        count = jnp.maximum(jnp.minimum(tile.end - first_token, shape.tokens) - begin, 0)
        size = shape.tokens
        while size:
            start = begin + lax.div(count, jnp.int32(2 * size)) * (2 * size)

            @pl.when(lax.rem(lax.div(count, jnp.int32(size)), jnp.int32(2)) == 1)
            def _(start=start, size=size):
                self.copy_out(tile, start, self.refs.out, first_token + start, size)

            size //= 2

    def store_part(self, tile: Tile, first_token) -> None:
        """Writes eight tokens at a time, those around the tile's own included: they have a place, too."""
        for start in range(0, self.body.shape.tokens, TOKEN_ALIGNMENT):
            token = first_token + start

            @pl.when((token + TOKEN_ALIGNMENT > tile.begin) & (token < tile.end))
            def _(start=start, token=token):
                place = pl.multiple_of(token + tile.shift, TOKEN_ALIGNMENT)
                self.copy_out(tile, start, self.refs.partial, place, TOKEN_ALIGNMENT)

    def copy_out(self, tile: Tile, start, out_ref, first_row, size: int) -> None:
        """Copies `size` tokens of all heads from the tile's token `start` on to `out_ref`, from `first_row` on."""
        shape = self.body.shape
        for g in range(shape.heads):
            columns = vector.head_columns(tile.first_head + g, self.body.head_dim)
            plgpu.copy_smem_to_gmem(
                self.out_smem.at[pl.ds(g * shape.tokens + start, size)], out_ref.at[pl.ds(first_row, size), columns]
            )
