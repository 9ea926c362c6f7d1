"""Prefill on chips without wgmma (Ampere, Ada, Blackwell): ragged causal chunks, one warpgroup per CTA, on mma.

It uses the tiles, the order and the masks of `prefill_hopper`, and the ring of K and V tiles of `decode`. On Blackwell,
tcgen05 is not used (scripts/lab/results/decisions.md).

Interpret mode has no cp.async: in tests, copies by TMA replace it, with the waits of the cp.async code. Interpret mode
does not check mma (a plain product replaces it), fragment layouts, swizzles and the alignment that TMA needs. It finds
no races between CTAs, because it runs them one after another. It does find missing waits, slots that are refilled too
early, and wrong masks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import conversion, matmul, online_softmax, persistent, prefill_tile, vector
from pallas_kernels.gpu.decode import RingTiles
from pallas_kernels.gpu.parts import NO_PARTS, Parts
from pallas_kernels.gpu.prefill_body import PrefillBody, PrefillOperands, PrefillRefs, results
from pallas_kernels.gpu.prefill_tile import TILE_M, Tile
from pallas_kernels.gpu.ring import Ring, Source


def prefill(
    output: Any | None,
    operands: PrefillOperands,
    *,
    scale: float,
    sizes: RingTiles,
    num_ctas: int,
    parts: Parts = NO_PARTS,
    interpret: Any = None,
) -> tuple[jax.Array, ...]:
    """Writes the rows of the list's tiles to `output`, a Ref [T, N * H], in place. Returns the output, if `output` is
    None, and the results of the tiles that are parts: see `prefill_body.results`."""
    body = _Body.of(operands, scale=scale, sizes=sizes, num_ctas=num_ctas, interpret=interpret)
    blocks, head_dim, dtype, kv_dtype = body.blocks, body.head_dim, body.dtype, body.kv_dtype

    def swizzled(dtype: Any, copied_rows: int) -> tuple[Any, ...]:
        return matmul.swizzled(head_dim, dtype, copied_rows=None if sizes.use_tma else copied_rows)

    ring_shape = (sizes.num_stages, sizes.block_kv, head_dim)
    kv_tiles = plgpu.SMEM(ring_shape, kv_dtype, transforms=swizzled(kv_dtype, blocks.copy_tokens))
    scratch: dict[str, Any] = {
        "q_smem": plgpu.SMEM((TILE_M, head_dim), dtype, transforms=swizzled(dtype, body.shape.tokens)),
        # The result reuses the memory of the keys after their last use.
        "k_or_out_smem": plgpu.RefUnion(kv_tiles, plgpu.SMEM((TILE_M, head_dim), dtype)),
        "v_smem": kv_tiles,
        "p_smem": plgpu.SMEM((TILE_M, sizes.block_kv), dtype, transforms=matmul.swizzled(sizes.block_kv, dtype)),
    }
    if sizes.use_tma:
        scratch["q_arrived"] = plgpu.Barrier(num_arrivals=body.shape.heads)
        scratch["arrived"] = plgpu.Barrier(num_arrivals=2 * blocks.copies, num_barriers=sizes.num_stages)
    if kv_dtype != dtype:
        scratch["k_converted"] = scratch["v_converted"] = conversion.converted_tile((sizes.block_kv, head_dim), dtype)
    return plgpu.kernel(
        body,
        out_type=results(body, operands, output is None, parts, warpgroups=1),
        scratch_types=scratch,
        grid=(num_ctas,),
        grid_names=("cta",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="paged_prefill_mma",
    )(*operands, *([] if output is None else [output]))


@dataclass(frozen=True, kw_only=True)
class _Refs(PrefillRefs):
    q_smem: Any  # [64, H]
    k_or_out_smem: Any  # the keys' tiles [stages, block_kv, H], and in their place the result [64, H]
    v_smem: Any  # [stages, block_kv, H]
    p_smem: Any  # [64, block_kv]
    q_arrived: Any = None  # barrier; None: cp.async
    arrived: Any = None  # barriers of the ring; None: cp.async
    k_converted: Any = None  # [block_kv, H], of 8-bit tiles
    v_converted: Any = None


class _Body(PrefillBody):
    def __call__(self, *arrays: Any, **scratch: Any) -> None:
        refs = _Refs(*arrays, **scratch)
        cta = lax.axis_index("cta")
        units = refs.num_tiles[0] * (self.num_kv_heads * self.shape.tiles_per_group)

        @pl.loop(0, persistent.rounds(units, self.num_ctas))
        def _(round_: jax.Array) -> None:
            unit = persistent.unit_of(round_, cta, self.num_ctas)
            pl.when(unit < units)(lambda: self.attend_unit(refs, unit))

    def attend_unit(self, refs: _Refs, unit: jax.Array) -> None:
        k_smem, out_smem = refs.k_or_out_smem
        tile = Tile.read(refs.tiles, unit, self.shape, self.num_kv_heads)
        source = Source(
            shape=self.blocks, kv_ref=refs.kv_pages, pages_ref=refs.page_table, first_page=refs.first_page[0],
            row=tile.row, kv_head=tile.kv_head,
        )  # fmt: skip
        ring = Ring(
            source=source, first_block=tile.first_block, num_blocks=tile.num_blocks,
            num_stages=self.sizes.num_stages, k_smem=k_smem, v_smem=refs.v_smem, arrived=refs.arrived,
            k_converted=refs.k_converted, v_converted=refs.v_converted,
        )  # fmt: skip
        self.load_queries(refs.queries, refs.q_smem, tile, refs.q_arrived)
        output, sums = self.attend(tile, ring, refs.q_smem, refs.p_smem)
        out_smem[...] = output.astype(self.dtype)
        self.store(refs, tile, sums, out_smem)

    def load_queries(self, q_ref: Any, q_smem: Any, tile: Tile, arrived: Any) -> None:
        prefill_tile.load_queries(q_ref, q_smem, self.shape, tile, tile.token, arrived)
        if arrived is None:
            plgpu.wait_gmem_to_smem(0)
        else:
            plgpu.barrier_wait(arrived)

    def attend(self, tile: Tile, ring: Ring, q_smem: Any, p_smem: Any) -> Any:
        """The tile's attention output f32[64, H], normalised, and the log2 of its softmax's divisor f32[64]."""
        layout = plgpu.Layout
        acc_layout = layout.MMA_ACC(self.dtype, m_warps=4)
        lhs, rhs = layout.MMA_LHS(self.dtype, m_warps=4), layout.MMA_RHS(self.dtype, m_warps=4)
        block_kv = self.sizes.block_kv
        shape = (TILE_M, block_kv)
        ring.fill()

        def step(i: jax.Array, carry: Any, *, masked: bool) -> Any:
            acc, peak, total = carry
            k_tile, v_tile = ring.tiles(ring.advance(i - tile.first_block))
            q = plgpu.load(q_smem, layout=lhs, optimized=False)
            k = plgpu.load(k_tile.transpose((1, 0)), layout=rhs, optimized=False)
            zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), acc_layout)
            scores = matmul.mma(zeros, q, k, interpret=self.interpret)
            if masked:
                mask = prefill_tile.causal_mask(self.shape, tile, tile.token, i * block_kv, block_kv, acc_layout)
                scores = jnp.where(mask, scores, -jnp.inf)
            p, alpha, new_peak, total = online_softmax.step(scores, peak, total, self.scale_log2)
            p_smem[...] = p.astype(self.dtype)
            p = plgpu.load(p_smem, layout=lhs, optimized=False)
            v = plgpu.load(v_tile, layout=rhs, optimized=False)
            if masked:
                # The places after the last key may hold any values, and 0 * NaN is NaN.
                existing = matmul.rows_before(tile.kv_len - i * block_kv, v.shape, rhs)
                v = jnp.where(existing, v, jnp.zeros_like(v))
            acc = online_softmax.scaled(acc, alpha)
            return matmul.mma(acc, p, v, interpret=self.interpret), new_peak, total

        carry = online_softmax.start(TILE_M, self.head_dim, acc_layout)
        first_masked = tile.masked_from(tile.token, block_kv)
        carry = lax.fori_loop(tile.first_block, first_masked, lambda i, c: step(i, c, masked=False), carry)
        carry = lax.fori_loop(first_masked, tile.end_block, lambda i, c: step(i, c, masked=True), carry)
        ring.drain()
        return online_softmax.finish(*carry)

    def store(self, refs: _Refs, tile: Tile, sums: Any, out_smem: Any) -> None:
        """Writes the results of the tile's own tokens: to the partial results if the tile is a part, otherwise to the
        output."""
        if refs.partial is None:
            self.store_rows(tile, out_smem, refs.out, 0)
        else:
            pl.when(tile.part < 0)(lambda: self.store_rows(tile, out_smem, refs.out, 0))

            @pl.when(tile.part >= 0)
            def _() -> None:
                refs.sums[tile.heads, :, tile.part] = sums
                self.store_rows(tile, out_smem, refs.partial, tile.shift)

        if self.sizes.use_tma:
            plgpu.commit_smem()  # the next tile's copies overwrite this one's queries, keys and output

    def store_rows(self, tile: Tile, out_smem: Any, out_ref: Any, shift: jax.Array | int) -> None:
        """Blocks of tokens in stores of 16 bytes a thread. A block that is not all the tile's own is stored by rows."""
        tokens, dim = self.shape.tokens, self.head_dim
        together = min(tokens, vector.rows_together(dim, self.dtype.itemsize))
        layout = vector.rows_layout(together, dim)

        @pl.loop(0, tokens // together)
        def _(block: jax.Array) -> None:
            first = block * together
            begin, end = tile.token + first, tile.token + first + together
            is_own = (tile.begin <= begin) & (end <= tile.end)

            @pl.when(is_own)
            def _() -> None:
                def store(g: int) -> None:
                    rows = out_smem.at[pl.ds(g * tokens + first, together)]
                    columns = vector.head_columns(tile.first_head + g, dim)
                    out_ref[pl.ds(begin + shift, together), columns] = plgpu.load(rows, layout=layout, optimized=False)

                prefill_tile.for_own_heads(self.shape, tile, store)

            @pl.when(~is_own)
            def _() -> None:
                @pl.loop(jnp.maximum(tile.begin, begin), jnp.minimum(tile.end, end))
                def _(token: jax.Array) -> None:
                    def store(g: int) -> None:
                        row = vector.load(out_smem.at[g * tokens + token - tile.token], dim)
                        out_ref[token + shift, vector.head_columns(tile.first_head + g, dim)] = row

                    prefill_tile.for_own_heads(self.shape, tile, store)
