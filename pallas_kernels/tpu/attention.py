"""The operation on a TPU: a decode kernel for the rows of one token, a mixed kernel for the others."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.spec import AttentionSpec, RaggedBatch
from pallas_kernels.tpu import append, blocks, decode, decode_memory, lanes, layout, mixed, mixed_memory, paging
from pallas_kernels.tpu.layout import Geometry

PAGE_AXIS, KV_HEAD_AXIS, kv_pages = 0, layout.KV_HEAD_AXIS, layout.kv_pages


def validate(spec: AttentionSpec) -> None:
    """Raises UnavailableError, before tracing, if these kernels do not support `spec`, or do not fit a chip's VMEM."""
    layout.validate(spec)
    blocks.validate_memory(layout.geometry(spec))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class AttentionMetadata:
    """The arrays that all layers of a step share. They are computed once per step. Their values recompile nothing."""

    kv_lens: jax.Array  # i32[S]
    page_table: jax.Array  # i32[S * windows_per_seq, 1, 128], from `paging.windows_of_table`
    query_starts: jax.Array  # i32[S + 1]
    num_singles: jax.Array  # i32[]
    num_rows: jax.Array  # i32[]
    decode_pages: jax.Array  # i32[min(S, T)]: the page of each decode row's new token
    longest_single: jax.Array  # i32[]: tokens of the longest single-token row; 0 if there is none
    new_pages: jax.Array | None  # i32[page slots]: the pages of the rows' new tokens (`append`)
    pages_per_seq: int = jax.tree.static()
    decode_only: bool = jax.tree.static()
    spec_decode: bool = jax.tree.static()


def make_metadata(
    batch: RaggedBatch, spec: AttentionSpec, *, num_tokens: int, decode_only: bool, spec_decode: bool = False
) -> AttentionMetadata:
    """The page table in windows, the pages of the new tokens, and the lengths of the rows. Each layer of the step uses
    them."""
    g = layout.geometry(spec)
    num_rows, pages_per_seq = batch.page_table.shape
    last = jnp.maximum(batch.kv_lens[: min(num_rows, num_tokens)] - 1, 0)
    return AttentionMetadata(
        kv_lens=batch.kv_lens,
        page_table=paging.windows_of_table(batch.page_table),
        query_starts=batch.query_starts,
        num_singles=batch.num_singles,
        num_rows=batch.num_rows,
        decode_pages=batch.page_table[jnp.arange(last.size), last // g.page_size],
        longest_single=jnp.max(jnp.where(jnp.arange(num_rows) < batch.num_singles, batch.kv_lens, 0)),
        new_pages=None if decode_only else _new_pages(batch, g, num_tokens),
        pages_per_seq=pages_per_seq,
        decode_only=decode_only,
        spec_decode=spec_decode,
    )


def _new_pages(batch: RaggedBatch, g: Geometry, num_tokens: int) -> jax.Array:
    """The pages to which the rows' new tokens are written, row after row: i32[page slots]."""
    starts = batch.query_starts
    rows = starts.shape[0] - 1
    bases = append.page_base(jnp.arange(rows, dtype=jnp.int32), starts[:-1], g.page_size)
    slot = jnp.arange(append.num_page_slots(num_tokens, rows, g.page_size), dtype=jnp.int32)
    row = jnp.searchsorted(bases, slot, side="right", method="scan_unrolled").astype(jnp.int32) - 1
    first = batch.kv_lens[row] - (starts[row + 1] - starts[row])  # the position of the row's first new token
    index = first // g.page_size + slot - bases[row]
    return batch.page_table[row, jnp.clip(index, 0, batch.page_table.shape[1] - 1)]


def append_and_attend(
    queries: jax.Array,  # [T, N, H]
    keys: jax.Array,  # [T, K, H]
    values: jax.Array,  # [T, K, H]
    kv_pages: jax.Array,  # uint32[P, planes, page_words, 128]
    metadata: AttentionMetadata,
    first_page: jax.Array | int,
    kv_scales: jax.Array | None = None,  # f32[2, K]
    *,
    spec: AttentionSpec,
    interpret: bool | pltpu.InterpretParams,
    block_sizes: blocks.BlockSizes | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Appends the step's K/V to the pages, and attends over them. Returns the output [T, N, H] and the pages.

    `interpret` runs the same kernels on a CPU. `block_sizes` replaces the chosen sizes. Raises ValueError if the sizes
    do not fit together.
    """
    g = layout.geometry(spec)
    columns = layout.queries_to_columns(queries, g), layout.kv_to_columns(keys, values, g)
    kernels = _Kernels(g=g, kv_column=0, interpret=interpret, block_sizes=block_sizes)
    out, kv_pages = kernels(*columns, None, kv_pages, metadata, first_page, kv_scales)
    return layout.columns_to_heads(out, g), kv_pages


def append_and_attend_projected(
    columns: jax.Array,  # [T, (N + 2K) * H]
    cos: jax.Array,  # f32[T, 1, H / 2]
    sin: jax.Array,  # f32[T, 1, H / 2]
    kv_pages: jax.Array,  # uint32[P, planes, page_words, 128]
    metadata: AttentionMetadata,
    first_page: jax.Array | int,
    kv_scales: jax.Array | None = None,  # f32[2, K]
    *,
    spec: AttentionSpec,
    interpret: bool | pltpu.InterpretParams,
    block_sizes: blocks.BlockSizes | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Rotates queries and keys, appends the new K/V, and attends. Returns the output [T, N * H] and the pages.

    No operand is copied or moved before the kernels read it. Queries are rounded once, after the rotation and the
    scale.
    """
    g = layout.geometry(spec)
    rotation = lanes.rotation_columns(cos, sin, g)
    kernels = _Kernels(g=g, kv_column=g.query_columns, interpret=interpret, block_sizes=block_sizes)
    return kernels(columns, columns, rotation, kv_pages, metadata, first_page, kv_scales)


def takes_projection(spec: AttentionSpec) -> bool:
    """Whether `append_and_attend_projected` supports `spec`: the kernels can read its columns without a change."""
    return not layout.geometry(spec).kv_shared


@dataclass(frozen=True, kw_only=True)
class _Kernels:
    """Runs the decode kernel and then the kernel for the other rows."""

    g: Geometry
    kv_column: int  # the column of the new K/V at which K and V begin
    interpret: bool | pltpu.InterpretParams
    block_sizes: blocks.BlockSizes | None

    def __call__(
        self,
        queries: jax.Array,  # [T, columns]
        new_kv: jax.Array,  # [T, columns]
        rotation: jax.Array | None,  # f32[T, 256]
        kv_pages: jax.Array,
        metadata: AttentionMetadata,
        first_page: jax.Array | int,
        kv_scales: jax.Array | None,  # f32[2, K]
    ) -> tuple[jax.Array, jax.Array]:
        """The output [T, query_columns] and the pages."""
        g, interpret = self.g, pltpu.InterpretParams() if self.interpret is True else self.interpret
        chip = None if interpret else blocks.this_chip()
        max_singles, num_tokens = metadata.decode_pages.shape[0], queries.shape[0]
        each = -(-num_tokens // metadata.kv_lens.shape[0])  # tokens of a row, if all have as many
        sizes = self.block_sizes or blocks.choose(
            g, metadata.pages_per_seq, chip, max_decodes=max_singles, spec_decode=each if metadata.spec_decode else 0
        )
        sizes.validate(g)
        # The kernels copy whole tiles of tokens.
        queries, new_kv = (_padded(x, g.token_tile) for x in (queries, new_kv))
        rotation = None if rotation is None else _padded(rotation, g.token_tile)
        first_page = jnp.int32(first_page)
        kv_scales = None if kv_scales is None else kv_scales.reshape(-1)
        decodes = decode_memory.Operands(
            queries=queries,
            new_kv=new_kv,
            rotation=rotation,
            kv_scales=kv_scales,
            kv_pages=kv_pages,
            kv_lens=metadata.kv_lens,
            new_pages=metadata.decode_pages,
            page_table=metadata.page_table,
            scalars=jnp.stack([metadata.num_singles, first_page, metadata.longest_single]),
        )
        statics = {"g": g, "kv_column": self.kv_column, "interpret": interpret}
        out, kv_pages = decode.attend(decodes, blocks=sizes.decode, **statics)
        if not metadata.decode_only:
            assert metadata.new_pages is not None
            mixed_rows = mixed_memory.Operands(
                queries=queries,
                new_kv=new_kv,
                rotation=rotation,
                kv_scales=kv_scales,
                out=out,
                kv_pages=kv_pages,
                kv_lens=metadata.kv_lens,
                query_starts=metadata.query_starts,
                new_pages=metadata.new_pages,
                page_table=metadata.page_table,
                scalars=jnp.stack([metadata.num_singles, metadata.num_rows, first_page]),
            )
            out, kv_pages = mixed.attend(mixed_rows, blocks=sizes.mixed, **statics)
        return out[:num_tokens], kv_pages


def _padded(x: jax.Array, tile: int) -> jax.Array:
    rest = -x.shape[0] % tile
    return jnp.pad(x, ((0, rest), (0, 0))) if rest else x
