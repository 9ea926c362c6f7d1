"""Prefill on Hopper: ragged causal chunks against their pages, warp-specialised, on wgmma.

A persistent CTA per multiprocessor takes tiles from the list. One warpgroup (`prefill_memory`) fills the ring of K and
V tiles. Two compute warpgroups multiply 64 rows each. A compute warpgroup starts the scores of the next block before
the softmax of the present block. The softmax then overlaps with two products of the same warpgroup: these scores, and
the product of the previous block with its values.

Source of the algorithm: Shah et al., FlashAttention-3 (2024).

Interpret mode does not check wgmma (synchronous plain products replace it), fragment layouts, swizzles, the alignment
that TMA needs, `set_max_registers`, and writes to registers that a running product still reads. Tests look for such
writes in the compiled code. Interpret mode finds no races between CTAs, because it runs them one after another. It does
find missing waits, slots that are released too early, missing fences before copies out, and wrong masks. A fault that
leaves a warpgroup waiting may hang it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import matmul, online_softmax, persistent, prefill_tile, vector
from pallas_kernels.gpu.parts import NO_PARTS, Parts
from pallas_kernels.gpu.prefill_body import PrefillBody, PrefillOperands, PrefillRefs, results
from pallas_kernels.gpu.prefill_memory import COMPUTE_WARPGROUPS, memory_of, queries_place
from pallas_kernels.gpu.prefill_tile import TILE_M, Tile
from pallas_kernels.gpu.tile_list import TOKEN_ALIGNMENT


@dataclass(frozen=True, kw_only=True)
class PrefillTiles:
    """The sizes of the ring's tiles for K and V."""

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
        # Both compute warpgroups arrive at these barriers: one for each K and V slot, and one for the queries' place.
        "met": plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=2 * stages + 1),
    }
    if interpret is not None:  # these replace accumulators in registers
        scratch["scores"] = plgpu.SMEM((COMPUTE_WARPGROUPS, TILE_M, sizes.block_kv), jnp.float32)
        scratch["acc"] = plgpu.SMEM((COMPUTE_WARPGROUPS, TILE_M, head_dim), jnp.float32)
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
    arrived: Any  # barriers: for each stage, one for K and one for V
    met: Any  # barriers at which both compute warpgroups release slots of the ring and the queries' place
    tail_arrived: Any = None  # barrier of `prefill_memory.CopyingMemory`
    kv8_smem: Any = None  # [stages of K and V, block_kv, H], tiles of `prefill_memory.ConvertingMemory`
    kv8_arrived: Any = None  # barriers of `kv8_smem`
    scores: Any = None  # f32[warpgroups, 64, block_kv], only in the interpreter
    acc: Any = None  # f32[warpgroups, 64, H], only in the interpreter


class _Body(PrefillBody):
    def __call__(self, *arrays: Any, **scratch: Any) -> None:
        refs, kind = _Refs(*arrays, **scratch), memory_of(self)
        warpgroup = lax.axis_index("warpgroup")
        cta = lax.axis_index("cta")

        def for_each_tile(do: Any) -> Any:
            """Calls `do(unit, tile, blocks so far)` for every unit of this CTA. Returns the number of all blocks."""
            units = refs.num_tiles[0] * (self.num_kv_heads * self.shape.tiles_per_group)
            rounds = persistent.rounds(units, self.num_ctas)

            def one(round_: jax.Array, num_blocks: jax.Array) -> Any:
                unit = persistent.unit_of(round_, cta, self.num_ctas)
                known = jnp.minimum(unit, units - 1)
                tile = self.tile(refs, known)
                pl.when(unit < units)(lambda: do(known, tile, num_blocks))
                return num_blocks + jnp.where(unit < units, tile.num_blocks, 0)

            return lax.fori_loop(0, rounds, one, jnp.int32(0))

        @pl.when(warpgroup < COMPUTE_WARPGROUPS)
        def _() -> None:
            plgpu.barrier_arrive(queries_place(refs, self))  # it is free at the start
            plgpu.set_max_registers(kind.compute_registers, action="increase")

            def compute(*accumulators: Any) -> None:
                for_each_tile(partial(self.attend, refs, warpgroup, accumulators))

            if self.interpret is None:
                shapes = (TILE_M, self.sizes.block_kv), (TILE_M, self.head_dim)
                pl.run_scoped(compute, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))
            else:
                compute(refs.scores.at[warpgroup], refs.acc.at[warpgroup])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == COMPUTE_WARPGROUPS)
        def _() -> None:
            plgpu.set_max_registers(kind.registers, action="decrease")
            memory = kind(self, refs)
            memory.drain(for_each_tile(lambda _, tile, num_blocks: memory.feed(tile, num_blocks)))

    def tile(self, refs: _Refs, unit: jax.Array) -> Tile:
        return Tile.read(refs.tiles, unit, self.shape, self.num_kv_heads)

    def attend(
        self, refs: _Refs, warpgroup: Any, accumulators: Any, unit: jax.Array, tile: Tile, blocks_before: jax.Array
    ) -> None:
        """Computes one compute warpgroup's part of a tile. `accumulators`: for scores [64, block_kv] and for results
        [64, H]."""
        scores, acc = accumulators
        result = _Run(self, refs, warpgroup, scores, acc, tile, blocks_before).attend()
        # The tile is read again, and places are computed again, so that no register holds them during the run.
        unit, warpgroup = lax.optimization_barrier((unit, warpgroup))
        _Results(self, refs, warpgroup, self.tile(refs, unit)).store(*result)


@dataclass(frozen=True)
class _Run:
    """The computation of one warpgroup on the blocks of a tile.

    While the softmax of a block is computed, two products run: the previous block with its values, and the scores of
    the next block.
    """

    body: _Body
    refs: _Refs
    warpgroup: Any
    scores: Any  # accumulator [64, block_kv]
    acc: Any
    tile: Tile
    blocks_before: Any  # blocks of earlier tiles that have gone through the ring

    @property
    def first_token(self) -> Any:
        """The token of the warpgroup's first row."""
        return self.tile.token + self.warpgroup * self.body.shape.tokens

    @property
    def queries(self) -> Any:
        """The warpgroup's queries [64, H] in SMEM."""
        return self.refs.q_smem.at[self.warpgroup]

    def attend(self) -> tuple[jax.Array, jax.Array]:
        """The normalised result f32[64, H], and the log2 of the softmax's divisors (`online_softmax.finish`)."""
        tile, body, layout = self.tile, self.body, plgpu.Layout.WGMMA
        plgpu.barrier_wait(self.refs.q_arrived.at[self.warpgroup])
        acc, peak, total = online_softmax.start(TILE_M, body.head_dim, layout)
        self.acc[...] = acc
        scores = plgpu.layout_cast(jnp.zeros((TILE_M, body.sizes.block_kv), jnp.float32), layout)
        # A tile of padding tokens has no block, so the first and the last block are loops, too.
        second = jnp.minimum(tile.first_block + 1, tile.end_block)
        last = jnp.maximum(tile.end_block - 1, tile.first_block)
        first_masked = jnp.minimum(tile.masked_from(self.first_token, body.sizes.block_kv), last)
        carry = lax.fori_loop(tile.first_block, second, self.begin, (peak, total, scores))
        carry = lax.fori_loop(tile.first_block, first_masked, partial(self.step, masked=False), carry)
        carry = lax.fori_loop(first_masked, last, partial(self.step, masked=True), carry)
        plgpu.barrier_arrive(queries_place(self.refs, body))
        peak, total, _ = lax.fori_loop(last, tile.end_block, self.end, carry)
        return online_softmax.finish(matmul.result(self.acc, interpret=body.interpret), peak, total)

    def begin(self, i: jax.Array, carry: Any) -> Any:
        """Computes the scores of the first block."""
        peak, total, _ = carry
        self.start_scores(i)
        return peak, total, self.finish_scores(i)

    def step(self, i: jax.Array, carry: Any, *, masked: bool) -> Any:
        """Computes a block that is not the last. Its scores are in `carry`."""
        peak, total, scores = carry
        self.start_scores(i + 1)
        weights, alpha, peak, total = self.softmax(i, scores, peak, total, masked=masked)
        acc = self.finish_values(i - 1)
        scores = self.finish_scores(i + 1)
        self.start_values(i, online_softmax.scaled(acc, alpha), weights)
        return peak, total, scores

    def end(self, i: jax.Array, carry: Any) -> Any:
        """Computes the last block. It is always masked; the mask has no effect if every key is seen."""
        peak, total, scores = carry
        weights, alpha, peak, total = self.softmax(i, scores, peak, total, masked=True)
        self.start_values(i, online_softmax.scaled(self.finish_values(i - 1), alpha), weights)
        self.finish_values(i)
        return peak, total, scores

    def softmax(self, i: jax.Array, scores: jax.Array, peak: jax.Array, total: jax.Array, *, masked: bool) -> Any:
        """The weights of a block, the factor of the earlier sum, and the new maximum and total
        (`online_softmax.step`)."""
        body, block_kv = self.body, self.body.sizes.block_kv
        if masked:
            first_key, layout = i * block_kv, plgpu.Layout.WGMMA
            mask = prefill_tile.causal_mask(body.shape, self.tile, self.first_token, first_key, block_kv, layout)
            scores = jnp.where(mask, scores, -jnp.inf)
        weights, alpha, peak, total = online_softmax.step(scores, peak, total, body.scale_log2)
        # The barrier keeps all of this before the next wait.
        weights, alpha = lax.optimization_barrier((weights, alpha))
        return weights, alpha, peak, total

    def start_scores(self, i: jax.Array) -> None:
        """Starts the product of a block's keys with the queries."""
        slot = self.slot(i)
        plgpu.barrier_wait(self.refs.arrived.at[2 * slot])
        self.scores[...] = plgpu.layout_cast(jnp.zeros(self.scores.shape, jnp.float32), plgpu.Layout.WGMMA)
        keys = self.refs.k_smem.at[slot].transpose((1, 0))
        matmul.start_wgmma(self.scores, self.queries, keys, interpret=self.body.interpret)

    def finish_scores(self, i: jax.Array) -> jax.Array:
        """Waits for the block's scores, and releases its keys."""
        slot, interpret = self.slot(i), self.body.interpret
        scores = matmul.result(self.scores, interpret=interpret)
        matmul.read_until_here(self.scores, self.queries, self.refs.k_smem.at[slot], interpret=interpret)
        plgpu.barrier_arrive(self.refs.met.at[2 * slot])
        return scores

    def start_values(self, i: jax.Array, acc: Any, weights: jax.Array) -> None:
        """Starts the product of a block's weights with its values, which is added to `acc`. The previous product must
        have ended: the tensor cores read its weights from the same registers."""
        slot = self.slot(i)
        weights = lax.optimization_barrier(weights).astype(self.body.dtype)
        self.acc[...] = acc
        plgpu.barrier_wait(self.refs.arrived.at[2 * slot + 1])
        matmul.start_wgmma(self.acc, weights, self.refs.v_smem.at[slot], interpret=self.body.interpret)

    def finish_values(self, i: jax.Array) -> jax.Array:
        """Waits for the sum, and releases the block's values, if the tile has the block."""
        slot, interpret = self.slot(i), self.body.interpret
        acc = matmul.result(self.acc, interpret=interpret)

        @pl.when(i >= self.tile.first_block)
        def _() -> None:
            matmul.read_until_here(self.acc, self.refs.v_smem.at[slot], interpret=interpret)
            plgpu.barrier_arrive(self.refs.met.at[2 * slot + 1])

        return acc

    def slot(self, i: jax.Array) -> Any:
        """The ring's slot for a block."""
        return lax.rem(self.blocks_before + (i - self.tile.first_block), jnp.int32(self.body.sizes.num_stages))


class _Results:
    """Stores the results of one warpgroup for a tile."""

    def __init__(self, body: _Body, refs: _Refs, warpgroup: Any, tile: Tile) -> None:
        self.body, self.refs, self.warpgroup, self.tile = body, refs, warpgroup, tile
        self.out_smem = refs.out_smem.at[warpgroup]
        self.first_token = tile.token + warpgroup * body.shape.tokens

    def store(self, acc: Any, sums: Any) -> None:
        """Writes the results of the tile's own tokens: to the partial results if the tile is a part, otherwise to the
        output."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the previous tile has left the buffer
        self.out_smem[...] = acc.astype(self.body.dtype)
        plgpu.commit_smem()
        if self.refs.partial is None:
            self.store_output()
            return
        pl.when(self.tile.part < 0)(self.store_output)

        @pl.when(self.tile.part >= 0)
        def _() -> None:
            self.refs.sums[self.tile.heads, pl.ds(self.warpgroup * TILE_M, TILE_M), self.tile.part] = sums
            self.store_part()

    def store_output(self) -> None:
        """Writes the rows of the tile's own tokens. TMA boxes have static sizes, so the copies have sizes of powers of
        two."""
        tile, tokens = self.tile, self.body.shape.tokens
        begin = jnp.maximum(tile.begin - self.first_token, 0)
        count = jnp.maximum(jnp.minimum(tile.end - self.first_token, tokens) - begin, 0)
        size = tokens
        while size:
            start = begin + lax.div(count, jnp.int32(2 * size)) * (2 * size)

            @pl.when(lax.rem(lax.div(count, jnp.int32(size)), jnp.int32(2)) == 1)
            def _(start: Any = start, size: int = size) -> None:
                self.copy_out(start, self.refs.out, self.first_token + start, size)

            size //= 2

    def store_part(self) -> None:
        """Writes eight tokens at a time. Neighbours of the tile's own tokens are written, too: they have a place in the
        partial results."""
        tile = self.tile
        for start in range(0, self.body.shape.tokens, TOKEN_ALIGNMENT):
            token = self.first_token + start

            @pl.when((token + TOKEN_ALIGNMENT > tile.begin) & (token < tile.end))
            def _(start: Any = start, token: jax.Array = token) -> None:
                place = pl.multiple_of(token + tile.shift, TOKEN_ALIGNMENT)
                self.copy_out(start, self.refs.partial, place, TOKEN_ALIGNMENT)

    def copy_out(self, start: jax.Array | int, out_ref: Any, first_row: jax.Array, size: int) -> None:
        """Copies `size` tokens of the tile's own heads to `out_ref`. The first is the tile's token `start`, and it goes
        to row `first_row`.

        `start` may be any row, so the source is aligned to 128 bytes only. The copy engine derives a swizzle of 128
        bytes from the address (CUDA C++ programming guide, on TMA's swizzle: the offset of the pattern is the address /
        128 % 8). Mosaic derives it from the offset in `out_smem`. Each warpgroup's part of `out_smem` begins at a
        multiple of 1,024 bytes, at which the pattern repeats, so both use the same swizzle.
        """
        shape, tile = self.body.shape, self.tile

        def copy(g: int) -> None:
            columns = vector.head_columns(tile.first_head + g, self.body.head_dim)
            plgpu.copy_smem_to_gmem(
                self.out_smem.at[pl.ds(g * shape.tokens + start, size)], out_ref.at[pl.ds(first_row, size), columns]
            )

        prefill_tile.for_own_heads(shape, tile, copy)
