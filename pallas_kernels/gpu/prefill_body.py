"""The operands, results and references of both prefill kernels, and their static parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from pallas_kernels.gpu.decode import LOG2E
from pallas_kernels.gpu.parts import Parts
from pallas_kernels.gpu.prefill_tile import TILE_M, TileShape
from pallas_kernels.gpu.ring import BlockShape
from pallas_kernels.gpu.tile_list import num_part_tiles


class PrefillOperands(NamedTuple):
    """The operands of both kernels, in their order. If the output is written in place, it follows as a Ref [T, N *
    H]."""

    queries: jax.Array  # [T, N * H]; T a multiple of 8, at least a tile
    kv_pages: jax.Array  # [P, 2, K, page, H]
    page_table: jax.Array  # i32[S, pages_per_seq]
    first_page: jax.Array  # i32[1]
    tiles: jax.Array  # i32[NT, TILE_FIELDS]
    num_tiles: jax.Array  # i32[1]


@dataclass(frozen=True)
class PrefillRefs:
    """The arguments of both kernels, in this order. Each kernel adds its scratch, by name."""

    queries: Any
    kv_pages: Any
    page_table: Any
    first_page: Any
    tiles: Any
    num_tiles: Any
    out: Any  # [T, N * H]
    partial: Any = None  # [slots, N * H]; None: no tile is a part
    sums: Any = None  # f32[tiles of the same tokens, rows of a tile, parts]


@dataclass(frozen=True, kw_only=True)
class PrefillBody:
    """The static part of a kernel's body; each kernel adds its `__call__`."""

    shape: TileShape
    num_kv_heads: int
    head_dim: int
    blocks: BlockShape
    dtype: Any  # dtype of queries, products and output
    kv_dtype: Any  # dtype of the pages
    scale_log2: float
    sizes: Any  # the kernel's own tiles; all have block_kv and num_stages
    num_ctas: int
    interpret: Any

    @classmethod
    def of(cls, operands: PrefillOperands, *, scale: float, sizes: Any, num_ctas: int, interpret: Any) -> Self:
        """The body for these operands' shapes."""
        _, _, num_kv_heads, page_size, head_dim = operands.kv_pages.shape
        num_heads = operands.queries.shape[1] // head_dim
        pages_per_seq = operands.page_table.shape[1]
        return cls(
            shape=TileShape(num_heads // num_kv_heads),
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            blocks=BlockShape(block_kv=sizes.block_kv, page_size=page_size, pages_per_seq=pages_per_seq),
            dtype=operands.queries.dtype,
            kv_dtype=operands.kv_pages.dtype,
            scale_log2=scale * LOG2E,
            sizes=sizes,
            num_ctas=num_ctas,
            interpret=interpret,
        )


def results(
    body: PrefillBody, operands: PrefillOperands, with_output: bool, parts: Parts, warpgroups: int
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The arrays that a kernel makes. They include the output [T, N * H], unless there is one already. If rows may be
    cut, they also include the results of the parts [slots, N * H] and the log2 of the divisors of their softmax,
    f32[tiles of the same tokens, rows of a tile, parts]. They have the order in which `combine` reads them as vectors.

    The parts' results are normalised and have the output's type. Rounding them adds no more to the error than rounding
    the merged result does: they are averaged with weights that sum up to 1.
    """
    shapes = []
    if with_output:
        shapes.append(jax.ShapeDtypeStruct(operands.queries.shape, body.dtype))
    if parts.num_slots:
        heads, rows = body.num_kv_heads * body.shape.tiles_per_group, warpgroups * TILE_M
        shapes.append(jax.ShapeDtypeStruct((parts.num_slots, operands.queries.shape[1]), body.dtype))
        shapes.append(jax.ShapeDtypeStruct((heads, rows, num_part_tiles(parts) + parts.vector), jnp.float32))
    return tuple(shapes)
