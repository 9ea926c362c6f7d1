"""Prefill where there is no wgmma (Ampere, Ada, Blackwell): ragged causal chunks, one warpgroup per CTA, on mma.

The tiles, their order and the masks are those of `prefill_hopper`; the ring of K and V tiles is that of `decode`. On
Blackwell this leaves tcgen05 unused: correct first, measured next.

What interpret mode does not see is told in `decode`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import matmul, prefill_tile, vector
from pallas_kernels.gpu.decode import LOG2E, RingTiles
from pallas_kernels.gpu.prefill_tile import TILE_M, Tile, TileShape
from pallas_kernels.gpu.ring import BlockShape, Ring, Source


def prefill(
    output: Any,  # Ref [T, N * H], written in place
    queries: jax.Array,  # [T, N * H]; T a multiple of 8, at least a tile
    kv_pages: jax.Array,  # [P, 2, K, page, H]
    page_table: jax.Array,  # i32[S, pages_per_seq]
    first_page: jax.Array,  # i32[1]
    tiles: jax.Array,  # i32[NT, TILE_FIELDS]
    num_tiles: jax.Array,  # i32[1]
    *,
    scale: float,
    sizes: RingTiles,
    num_ctas: int,
    interpret: Any = None,
) -> None:
    _, _, num_kv_heads, page_size, head_dim = kv_pages.shape
    num_heads = queries.shape[1] // head_dim
    dtype = queries.dtype
    blocks = BlockShape(block_kv=sizes.block_kv, page_size=page_size, pages_per_seq=page_table.shape[1])
    body = _Body(
        shape=TileShape(num_heads // num_kv_heads), num_kv_heads=num_kv_heads, head_dim=head_dim, blocks=blocks,
        dtype=dtype, scale_log2=scale * LOG2E, sizes=sizes, num_ctas=num_ctas, interpret=interpret,
    )  # fmt: skip

    def swizzled(copied_rows: int) -> tuple[Any, ...]:
        return matmul.swizzled(head_dim, dtype, copied_rows=None if sizes.use_tma else copied_rows)

    kv_tiles = plgpu.SMEM((sizes.num_stages, sizes.block_kv, head_dim), dtype, transforms=swizzled(blocks.copy_tokens))
    scratch: dict[str, Any] = {
        "q_smem": plgpu.SMEM((TILE_M, head_dim), dtype, transforms=swizzled(body.shape.tokens)),
        # The result goes through the place of the keys, once they are used up.
        "k_or_out_smem": plgpu.RefUnion(kv_tiles, plgpu.SMEM((TILE_M, head_dim), dtype)),
        "v_smem": kv_tiles,
        "p_smem": plgpu.SMEM((TILE_M, sizes.block_kv), dtype, transforms=matmul.swizzled(sizes.block_kv, dtype)),
    }
    if sizes.use_tma:
        scratch["q_arrived"] = plgpu.Barrier(num_arrivals=body.shape.heads)
        scratch["arrived"] = plgpu.Barrier(num_arrivals=2 * blocks.copies, num_barriers=sizes.num_stages)
    plgpu.kernel(
        body,
        out_type=(),
        scratch_types=scratch,
        grid=(num_ctas,),
        grid_names=("cta",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="paged_prefill_mma",
    )(queries, kv_pages, page_table, first_page, tiles, num_tiles, output)


@dataclass(frozen=True, kw_only=True)
class _Body:
    shape: TileShape
    num_kv_heads: int
    head_dim: int
    blocks: BlockShape
    dtype: Any
    scale_log2: float
    sizes: RingTiles
    num_ctas: int
    interpret: Any

    def __call__(
        self, q_ref, kv_ref, pages_ref, first_page_ref, tiles_ref, num_tiles_ref, out_ref,
        *, q_smem, k_or_out_smem, v_smem, p_smem, q_arrived=None, arrived=None,
    ):  # fmt: skip
        cta = lax.axis_index("cta")
        units = num_tiles_ref[0] * (self.num_kv_heads * self.shape.tiles_per_group)
        k_smem, out_smem = k_or_out_smem

        @pl.loop(0, lax.div(units + (self.num_ctas - 1), jnp.int32(self.num_ctas)))
        def _(round_):
            unit = prefill_tile.unit_of(round_, cta, self.num_ctas)

            @pl.when(unit < units)
            def _():
                tile = Tile.read(tiles_ref, unit, self.shape, self.num_kv_heads)
                source = Source(
                    shape=self.blocks, kv_ref=kv_ref, pages_ref=pages_ref, first_page=first_page_ref[0],
                    row=tile.row, kv_head=tile.kv_head,
                )  # fmt: skip
                ring = Ring(
                    source=source, first_block=jnp.int32(0), num_blocks=tile.num_blocks(self.sizes.block_kv),
                    num_stages=self.sizes.num_stages, k_smem=k_smem, v_smem=v_smem, arrived=arrived,
                )  # fmt: skip
                self.load_queries(q_ref, q_smem, tile, q_arrived)
                out_smem[...] = self.attend(tile, ring, q_smem, p_smem).astype(self.dtype)
                self.store(tile, out_smem, out_ref)

    def load_queries(self, q_ref, q_smem, tile: Tile, arrived) -> None:
        prefill_tile.load_queries(q_ref, q_smem, self.shape, tile, tile.token, arrived)
        if arrived is None:
            plgpu.wait_gmem_to_smem(0)
        else:
            plgpu.barrier_wait(arrived)

    def attend(self, tile: Tile, ring: Ring, q_smem, p_smem):
        """The tile's attention output f32[64, H], normalised."""
        layout = plgpu.Layout
        acc_layout = layout.MMA_ACC(self.dtype, m_warps=4)
        lhs, rhs = layout.MMA_LHS(self.dtype, m_warps=4), layout.MMA_RHS(self.dtype, m_warps=4)
        block_kv = self.sizes.block_kv
        shape = (TILE_M, block_kv)
        ring.fill()

        def step(i, carry, *, masked):
            acc, peak, total = carry
            slot = ring.advance(i)
            q = plgpu.load(q_smem, layout=lhs, optimized=False)
            k = plgpu.load(ring.k_smem.at[slot].transpose((1, 0)), layout=rhs, optimized=False)
            zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), acc_layout)
            scores = matmul.mma(zeros, q, k, interpret=self.interpret)
            if masked:
                mask = prefill_tile.causal_mask(self.shape, tile, tile.token, i * block_kv, block_kv, acc_layout)
                scores = jnp.where(mask, scores, -jnp.inf)
            new_peak = jnp.maximum(peak, scores.max(axis=1) * self.scale_log2)
            alpha = jnp.exp2(peak - new_peak)
            p = jnp.exp2(scores * self.scale_log2 - lax.broadcast_in_dim(new_peak, shape, [0]))
            total = total * alpha + p.sum(axis=1)
            p_smem[...] = p.astype(self.dtype)
            p = plgpu.load(p_smem, layout=lhs, optimized=False)
            v = plgpu.load(ring.v_smem.at[slot], layout=rhs, optimized=False)
            if masked:
                # What lies behind the last key was never written by this sequence. 0 * NaN is NaN.
                key = plgpu.broadcasted_iota(jnp.int32, (block_kv, self.head_dim), 0, layout=rhs)
                v = jnp.where(key < tile.kv_len - i * block_kv, v, jnp.zeros_like(v))
            if self.interpret is not None:
                plgpu.commit_smem()  # for the interpreter, plain reads must be over before TMA writes again
            acc = acc * lax.broadcast_in_dim(alpha, acc.shape, [0])
            return matmul.mma(acc, p, v, interpret=self.interpret), new_peak, total

        carry = (
            plgpu.layout_cast(jnp.zeros((TILE_M, self.head_dim), jnp.float32), acc_layout),
            plgpu.layout_cast(jnp.full((TILE_M,), prefill_tile.MASKED, jnp.float32), acc_layout.reduce(1)),
            plgpu.layout_cast(jnp.zeros((TILE_M,), jnp.float32), acc_layout.reduce(1)),
        )
        whole = tile.whole_blocks(tile.token, block_kv)
        carry = lax.fori_loop(0, whole, lambda i, c: step(i, c, masked=False), carry)
        acc, _, total = lax.fori_loop(whole, ring.num_blocks, lambda i, c: step(i, c, masked=True), carry)
        ring.drain()
        safe = jnp.where(total > 0, total, 1.0)  # padding has no keys: its output is zero
        return acc / lax.broadcast_in_dim(safe, acc.shape, [0])

    def store(self, tile: Tile, out_smem, out_ref) -> None:
        @pl.loop(tile.begin, jnp.minimum(tile.end, tile.token + self.shape.tokens))
        def _(token):
            for g in range(self.shape.heads):
                row = vector.load(out_smem.at[g * self.shape.tokens + token - tile.token], self.head_dim)
                out_ref[token, prefill_tile.head_columns(tile.first_head + g, self.head_dim)] = row

        if self.interpret is not None:
            plgpu.commit_smem()
