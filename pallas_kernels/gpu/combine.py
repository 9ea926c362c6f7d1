"""Combine: merges the partial results of rows that were cut into parts, and writes them to the output in place.

This is one launch for the decodes and the chunks of a step together, after both kernels. The last CTA of a row could
merge instead, if it knew that it is the last. That takes an atomic counter in global memory that returns its old value.
Pallas has none: its `atomic_store` returns nothing. A CTA could wait for the counter instead, but then all CTAs must
run at once: on a chip that holds fewer than the compiler's report says, the step would hang. Inline code could read the
counter, but the interpreter runs no inline code and allocates no semaphores in global memory, so no test without a chip
would cover it.

Interpret mode does not check vector layouts. It finds no races between CTAs, because it runs them one after another,
after all of the kernel before. It does find a lost part, and reads of memory that was never written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import persistent, vector
from pallas_kernels.gpu.decode import GroupRows
from pallas_kernels.gpu.parts import (
    MERGE_FIRST_PART,
    MERGE_FIRST_SLOT,
    MERGE_OFFSET,
    MERGE_PARTS,
    MERGE_SLOT_STRIDE,
    MERGE_TOKEN,
    Parts,
)
from pallas_kernels.gpu.prefill_tile import TILE_M, TileShape

FIELDS = (MERGE_TOKEN, MERGE_FIRST_SLOT, MERGE_SLOT_STRIDE, MERGE_FIRST_PART, MERGE_PARTS, MERGE_OFFSET)
IN_FLIGHT = 64  # registers of partial results that are loaded together
MAX_TRIPS = 4  # to memory, one after the other, for the most parts that a row may have, if each CTA has few heads

# Of a token, its place in its tile, and a query head: where `sums` has the sums of its parts.
Place = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def fewest_heads(group: int, head_dim: int, max_parts: int) -> int:
    """The number of query heads of a KV head that a CTA merges at a time, if that takes fewer trips. Many parts leave
    room for few heads."""
    most = MAX_TRIPS * IN_FLIGHT // (max_parts * vector.registers(head_dim))
    return max(heads for heads in range(1, group + 1) if group % heads == 0 and heads <= max(most, 1))


def trips(
    num_merges: jax.Array, most_parts: jax.Array, num_heads: int, heads: int, head_dim: int, num_ctas: int
) -> jax.Array:
    """Trips to memory, one after the other, of a CTA that merges so many heads at once: one for the sums of a token,
    and then those for its parts."""
    rounds = persistent.rounds(num_merges * (num_heads // heads), num_ctas)
    at_once = parts_at_once(heads, head_dim)
    return rounds * (1 + lax.div(most_parts + (at_once - 1), jnp.int32(at_once)))


def parts_at_once(heads: int, head_dim: int) -> int:
    """The number of partial results of each query head that are loaded together."""
    return max(4, IN_FLIGHT // (heads * vector.registers(head_dim)))


def place_of_decode(rows: GroupRows) -> Place:
    """The place of decode's partial results. Their sums are f32[K, 16, slots + parts of a row]."""

    def place(token: jax.Array, offset: jax.Array, head: jax.Array) -> tuple[jax.Array, jax.Array]:
        del offset
        kv_head = lax.div(head, jnp.int32(rows.group))
        return kv_head, token * rows.num_query_heads + head - rows.loaded(rows.first(token, kv_head))

    return place


def place_of_prefill(shape: TileShape) -> Place:
    """The place of prefill's partial results. Their sums are f32[tiles of the same tokens, rows of a tile, parts +
    parts of a tile]."""

    def place(token: jax.Array, offset: jax.Array, head: jax.Array) -> tuple[jax.Array, jax.Array]:
        del token
        group, tokens = jnp.int32(shape.group), jnp.int32(shape.tokens)
        tile, of_tile = shape.place(lax.rem(head, group))
        row = lax.div(offset, tokens) * TILE_M + of_tile * shape.tokens + lax.rem(offset, tokens)
        return lax.div(head, group) * shape.tiles_per_group + tile, row

    return place


@dataclass(frozen=True, kw_only=True)
class PartialResults:
    """The partial results of one kernel, which `combine` merges."""

    results: jax.Array  # [slots, N * H]
    sums: jax.Array  # f32[tiles, rows, slots + `parts.vector`]: the log2 of the parts' divisors
    merges: jax.Array  # i32[rows or tokens, MERGE_FIELDS]
    num_merges: jax.Array  # i32[2], see parts.merge_counts
    place: Place
    parts: Parts


def combine(
    output: Any,  # Ref [T, N * H], written in place
    kinds: Sequence[PartialResults],  # one or more; no token is in two of them
    *,
    group: int,  # query heads per KV head
    head_dim: int,
    num_ctas: int,
    interpret: Any = None,
) -> None:
    """Writes the tokens of every row that was cut. All other rows stay unchanged."""
    num_heads, dtype = output.shape[1] // head_dim, output.dtype

    def body(*refs: Any) -> None:
        cta = lax.axis_index("cta")
        arrays, out_ref, weights = refs[: 4 * len(kinds)], refs[4 * len(kinds)], refs[4 * len(kinds) + 1 :]
        for i, kind in enumerate(kinds):
            cta = merge_kind(kind.parts, kind.place, cta, *arrays[4 * i : 4 * i + 4], out_ref, weights[i])

    def merge_kind(parts: Any, place: Callable[..., Any], cta: jax.Array, *refs: Any) -> Any:
        """Returns the CTA's place in the order of those that merge the next kind: first those with nothing to do."""
        num_merges, most_parts = refs[3][0], refs[3][1]
        fewest = fewest_heads(group, head_dim, parts.max_parts)
        heads = jnp.int32(group)
        if fewest < group:
            spread, together = (
                trips(num_merges, most_parts, num_heads, n, head_dim, num_ctas) for n in (fewest, group)
            )
            is_spread = spread < together
            pl.when(is_spread)(lambda: merge(fewest, parts, place, cta, *refs))
            pl.when(jnp.logical_not(is_spread))(lambda: merge(group, parts, place, cta, *refs))
            heads = jnp.where(is_spread, fewest, group)
        else:
            merge(group, parts, place, cta, *refs)
        return lax.rem(cta + num_ctas - lax.rem(units_of(num_merges, heads), jnp.int32(num_ctas)), jnp.int32(num_ctas))

    def units_of(num_merges: jax.Array, heads: Any) -> Any:
        return num_merges * lax.div(jnp.int32(num_heads), heads)

    def merge(
        heads: Any,
        parts: Any,
        place: Callable[..., Any],
        cta: jax.Array,
        partial_ref: Any,
        sums_ref: Any,
        merges_ref: Any,
        num_merges_ref: Any,
        out_ref: Any,
        weight_smem: Any,
    ) -> None:
        """Merges `heads` at once. The results' bits do not depend on how many these are. The fields of a unit are read
        while the unit before is merged."""
        per_token = jnp.int32(num_heads // heads)
        units = units_of(num_merges_ref[0], jnp.int32(heads))

        def fields_of(unit: jax.Array) -> tuple[jax.Array, ...]:  # past the last unit, those of the last one
            index = lax.div(jnp.clip(unit, 0, jnp.maximum(units - 1, 0)), per_token)
            return tuple(merges_ref[index, field] for field in FIELDS)

        def one(round_: jax.Array, fields: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            unit = cta + round_ * num_ctas
            following = fields_of(unit + num_ctas)
            first_head = lax.rem(unit, per_token) * heads
            token, slot, stride, first_part, num_parts, offset = fields

            def sums_of(h: int) -> jax.Array:
                tile, row = place(token, offset, first_head + h)
                return vector.load_operand(sums_ref.at[tile, row, pl.ds(first_part, parts.vector)], parts.vector)

            def part_of(h: int, number: jax.Array) -> jax.Array:
                columns = vector.head_columns(first_head + h, head_dim)
                part = vector.load_operand(partial_ref.at[slot + number * stride, columns], head_dim)
                return part.astype(jnp.float32)

            merged = _merged(sums_of, part_of, num_parts, head_dim, weight_smem.at[pl.ds(0, heads)])
            for h, acc in enumerate(merged):
                out_ref[token, vector.head_columns(first_head + h, head_dim)] = acc.astype(dtype)
            return following

        lax.fori_loop(0, persistent.rounds(units - cta, num_ctas), one, fields_of(cta))

    plgpu.kernel(
        body,
        out_type=(),
        scratch_types=[plgpu.SMEM((group, kind.parts.vector), jnp.float32) for kind in kinds],
        grid=(num_ctas,),
        grid_names=("cta",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="paged_combine",
    )(*(array for kind in kinds for array in (kind.results, kind.sums, kind.merges, kind.num_merges)), output)


def _merged(
    sums_of: Callable[[int], jax.Array],  # of a query head: the parts' log2 of their divisors, f32[max parts]
    part_of: Callable[[int, jax.Array], jax.Array],  # of a query head and a part: its result, f32[H]
    num_parts: jax.Array,
    head_dim: int,
    weight_smem: Any,  # f32[heads, max parts]
) -> list[jax.Array]:
    """The mean of the parts' results, f32[H] for each query head. A part's weight is its divisor."""
    heads, max_parts = weight_smem.shape
    part = plgpu.broadcasted_iota(jnp.int32, (max_parts,), 0, layout=vector.layout(max_parts))
    of_heads = [sums_of(h) for h in range(heads)]  # a load does not pass the barriers of a reduction
    for h, loaded in enumerate(of_heads):
        sums = jnp.where(part < num_parts, loaded, -jnp.inf)  # after them are others' parts
        weights = jnp.exp2(sums - sums.max())
        weight_smem[h] = weights / weights.sum()

    at_once = parts_at_once(heads, head_dim)

    def step(i: jax.Array, accs: Any) -> Any:
        accs = list(accs)
        for u in range(at_once):
            part = i * at_once + u
            existing = jnp.minimum(part, num_parts - 1)  # beyond the last, the weight is zero
            for h in range(heads):
                accs[h] = accs[h] + weight_smem[h, part] * part_of(h, existing)
        return tuple(accs)

    zero = plgpu.layout_cast(jnp.zeros((head_dim,), jnp.float32), vector.layout(head_dim))
    return list(lax.fori_loop(0, lax.div(num_parts + (at_once - 1), jnp.int32(at_once)), step, (zero,) * heads))
