"""The operation on a TPU: a decode kernel for the rows of one token, a mixed kernel for the others."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.spec import AttentionSpec, RaggedBatch
from pallas_kernels.tpu import append, blocks, decode, decode_memory, layout, mixed, mixed_memory, paging
from pallas_kernels.tpu.layout import LANES, Geometry


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "kv_lens",
        "page_table",
        "query_starts",
        "num_singles",
        "num_rows",
        "decode_pages",
        "decode_shift",
        "new_pages",
        "word_tokens",
    ],
    meta_fields=["pages_per_seq", "decode_only"],
)
@dataclass(frozen=True, kw_only=True)
class AttentionMetadata:
    """The arrays that all layers of a step share. They are computed once per step and are data: nothing recompiles."""

    kv_lens: jax.Array  # i32[S]
    page_table: jax.Array  # i32[S * windows_per_seq, 1, 128], see `paging.pages_of_table`
    query_starts: jax.Array  # i32[S + 1]
    num_singles: jax.Array  # i32[]
    num_rows: jax.Array  # i32[]
    decode_pages: jax.Array  # i32[min(S, T)]: the page of a decode row's new token
    decode_shift: jax.Array  # u32[min(S, T)]: bits by which a decode row's new token is shifted within its word
    new_pages: jax.Array | None  # i32[page slots]: the pages of the rows' new tokens, see `append`
    word_tokens: jax.Array | None  # i32[kv_packing, W]: the step's token in each part of each new word; T for none
    pages_per_seq: int
    decode_only: bool


def make_metadata(batch: RaggedBatch, spec: AttentionSpec, *, num_tokens: int, decode_only: bool) -> AttentionMetadata:
    """See `pallas_kernels.api.PagedAttention.make_metadata`."""
    g = layout.geometry(spec)
    num_rows, pages_per_seq = batch.page_table.shape
    bits = 32 // g.kv_packing
    last = jnp.maximum(batch.kv_lens[: min(num_rows, num_tokens)] - 1, 0)
    return AttentionMetadata(
        kv_lens=batch.kv_lens,
        page_table=paging.windows_of_table(batch.page_table),
        query_starts=batch.query_starts,
        num_singles=batch.num_singles,
        num_rows=batch.num_rows,
        decode_pages=batch.page_table[jnp.arange(last.size), last // g.page_size],
        decode_shift=(last % g.kv_packing * bits).astype(jnp.uint32),
        new_pages=None if decode_only else _new_pages(batch, g, num_tokens),
        word_tokens=None if decode_only else _word_tokens(batch, g, num_tokens),
        pages_per_seq=pages_per_seq,
        decode_only=decode_only,
    )


def _new_pages(batch: RaggedBatch, g: Geometry, num_tokens: int) -> jax.Array:
    """The pages that each row's new tokens go to, row after row: i32[page slots]."""
    starts = batch.query_starts
    rows = starts.shape[0] - 1
    bases = append.page_base(jnp.arange(rows, dtype=jnp.int32), starts[:-1], g.page_size)
    slot = jnp.arange(append.num_page_slots(num_tokens, rows, g.page_size), dtype=jnp.int32)
    row = jnp.searchsorted(bases, slot, side="right", method="scan_unrolled").astype(jnp.int32) - 1
    first = batch.kv_lens[row] - (starts[row + 1] - starts[row])  # the position of the row's first new token
    index = first // g.page_size + slot - bases[row]
    return batch.page_table[row, jnp.clip(index, 0, batch.page_table.shape[1] - 1)]


def _word_tokens(batch: RaggedBatch, g: Geometry, num_tokens: int) -> jax.Array:
    """The step's token for each part of each new word: i32[kv_packing, W], num_tokens for none."""
    starts = batch.query_starts
    rows = starts.shape[0] - 1
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    row = jnp.searchsorted(starts[1:], token, side="right", method="scan_unrolled").astype(jnp.int32)
    row = jnp.minimum(row, rows - 1)
    first = batch.kv_lens[row] - (starts[row + 1] - starts[row])  # the position of the row's first new token
    position = first + token - starts[row]
    base = append.word_base(row, starts[row], g.kv_packing)
    word = base + position // g.kv_packing - first // g.kv_packing
    num_words = append.num_word_slots(num_tokens, rows, g.kv_packing)
    word = jnp.where(token < starts[-1], word, num_words)  # padding goes nowhere
    empty = jnp.full((g.kv_packing, num_words), num_tokens, jnp.int32)
    return empty.at[position % g.kv_packing, word].set(token, mode="drop")


def append_and_attend(
    queries: jax.Array,  # [T, N, H]
    keys: jax.Array,  # [T, K, H]
    values: jax.Array,  # [T, K, H]
    kv_pages: jax.Array,  # uint32[P, planes, page_words, 128]
    metadata: AttentionMetadata,
    first_page: jax.Array | int,
    *,
    spec: AttentionSpec,
    interpret: bool | pltpu.InterpretParams,
    block_sizes: blocks.BlockSizes | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.api.PagedAttention.__call__`. `interpret` runs the same kernels on a CPU; `block_sizes`
    replaces the chosen ones. Raises ValueError if the sizes do not fit together."""
    g = layout.geometry(spec)
    if interpret is True:
        interpret = pltpu.InterpretParams()
    chip = None if interpret else blocks.this_chip()
    num_tokens, max_singles = queries.shape[0], metadata.decode_shift.shape[0]
    sizes = block_sizes or blocks.choose(g, metadata.pages_per_seq, chip, max_decodes=max_singles)
    sizes.validate(g)
    rows = layout.queries_to_rows(queries, g)
    new_kv = _as_words(layout.kv_to_planes(keys, values, g))  # uint32[T, planes, 128]
    first_page = jnp.int32(first_page)
    new_words = new_kv[:max_singles] << metadata.decode_shift[:, None, None]
    decodes = decode_memory.Operands(
        rows=rows[:max_singles],
        new_words=new_words.swapaxes(0, 1),
        kv_pages=kv_pages,
        kv_lens=metadata.kv_lens,
        new_pages=metadata.decode_pages,
        page_table=metadata.page_table,
        scalars=jnp.stack([metadata.num_singles, first_page]),
    )
    out, kv_pages = decode.attend(decodes, g=g, blocks=sizes.decode, interpret=interpret)
    if not metadata.decode_only:
        assert metadata.new_pages is not None and metadata.word_tokens is not None
        mixed_rows = mixed_memory.Operands(
            queries=_pack_rows(rows.swapaxes(0, 1).reshape(g.num_k_planes, -1, LANES), g),
            new_words=_gather_words(new_kv, metadata.word_tokens, g),
            kv_pages=kv_pages,
            kv_lens=metadata.kv_lens,
            query_starts=metadata.query_starts,
            new_pages=metadata.new_pages,
            page_table=metadata.page_table,
            scalars=jnp.stack([metadata.num_singles, metadata.num_rows, first_page]),
        )
        others, kv_pages = mixed.attend(mixed_rows, g=g, blocks=sizes.mixed, interpret=interpret)
        others = _unpack_rows(others, g).reshape(g.num_k_planes, num_tokens, -1, LANES).swapaxes(0, 1)
        out = jnp.pad(out, ((0, num_tokens - max_singles), (0, 0), (0, 0), (0, 0)))
        is_single = jnp.arange(num_tokens) < metadata.num_singles
        out = jnp.where(is_single[:, None, None, None], out, others)
    return layout.rows_to_heads(out, g, spec.num_query_heads, spec.head_dim), kv_pages


def _as_words(x: jax.Array) -> jax.Array:
    """The bits of x, each value in the low part of a separate word."""
    return jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}")).astype(jnp.uint32)


def _gather_words(new_kv: jax.Array, word_tokens: jax.Array, g: Geometry) -> jax.Array:
    """uint32[T, planes, 128] -> uint32[planes, W, 128]: `kv_packing` tokens in each word, zeros where there is none."""
    bits = 32 // g.kv_packing
    words = jnp.zeros((), jnp.uint32)
    for part in range(g.kv_packing):
        words |= new_kv.at[word_tokens[part]].get(mode="fill", fill_value=0) << (bits * part)
    return words.swapaxes(0, 1)


def _pack_rows(rows: jax.Array, g: Geometry) -> jax.Array:
    """[planes, rows, 128] -> uint32[planes, rows / query_packing, 128], neighbouring rows in one word."""
    words = _as_words(rows).reshape(rows.shape[0], -1, g.query_packing, LANES)
    return words[:, :, 0] if g.query_packing == 1 else words[:, :, 0] | words[:, :, 1] << 16


def _unpack_rows(words: jax.Array, g: Geometry) -> jax.Array:
    if g.query_packing == 1:
        return jax.lax.bitcast_convert_type(words, g.dtype)
    parts = jnp.stack([words & 0xFFFF, words >> 16], axis=2).astype(jnp.uint16)
    return jax.lax.bitcast_convert_type(parts, g.dtype).reshape(words.shape[0], -1, LANES)
