"""Combine: merges the partial results of the sequences that `decode` split, and writes them to the output in place.

Interpret mode does not check vector layouts. It finds no races between CTAs, because it runs them one after another,
after all of `decode`. It does find a lost part, and reads of memory that was never written.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import vector
from pallas_kernels.gpu.decode import GroupRows
from pallas_kernels.gpu.work_list import MAX_SPLITS

UNROLL = 4  # partial results whose loads are in flight together, per query head


def combine(
    output: Any,  # Ref [rows * N, H], written in place
    partial: jax.Array,  # f32[W, K, G, H]
    lse: jax.Array,  # f32[K, 16, W + 128]
    row_items: jax.Array,  # i32[S, 2]: first item, number of items
    *,
    num_query_heads: int,
    interpret: Any = None,
) -> None:
    """Writes the rows of every sequence with several items. All other rows stay unchanged."""
    num_rows, head_dim = output.shape
    _, num_kv_heads, group, _ = partial.shape
    rows = GroupRows(num_rows, num_query_heads, group)
    dtype = output.dtype

    def body(partial_ref, lse_ref, row_items_ref, out_ref, weight_smem):
        row, kv_head = lax.axis_index("row"), lax.axis_index("kv_head")
        first_item, num_items = row_items_ref[row, 0], row_items_ref[row, 1]

        @pl.when(num_items > 1)
        def _():
            first_row = rows.first(row, kv_head)
            offset = first_row - rows.loaded(first_row)
            for g in range(group):
                sums = vector.load(lse_ref.at[kv_head, offset + g, pl.ds(first_item, MAX_SPLITS)], MAX_SPLITS)
                split = plgpu.broadcasted_iota(jnp.int32, (MAX_SPLITS,), 0, layout=vector.layout(MAX_SPLITS))
                sums = jnp.where(split < num_items, sums, -jnp.inf)  # after them are other sequences' items
                weights = jnp.exp2(sums - sums.max())
                weight_smem[g] = weights / weights.sum()

            def step(i, accs):
                accs = list(accs)
                for u in range(UNROLL):
                    split = i * UNROLL + u
                    item = first_item + jnp.minimum(split, num_items - 1)  # beyond the last, the weight is zero
                    for g in range(group):
                        part = vector.load(partial_ref.at[item, kv_head, g], head_dim)
                        accs[g] = accs[g] + weight_smem[g, split] * part
                return tuple(accs)

            zero = plgpu.layout_cast(jnp.zeros((head_dim,), jnp.float32), vector.layout(head_dim))
            accs = lax.fori_loop(0, lax.div(num_items + (UNROLL - 1), UNROLL), step, (zero,) * group)
            for g in range(group):
                out_ref[first_row + g] = accs[g].astype(dtype)

    plgpu.kernel(
        body,
        out_type=(),
        scratch_types=[plgpu.SMEM((group, MAX_SPLITS), jnp.float32)],
        grid=(row_items.shape[0], num_kv_heads),
        grid_names=("row", "kv_head"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="paged_decode_combine",
    )(partial, lse, row_items, output)
