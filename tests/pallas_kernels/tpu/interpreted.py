"""Runs the TPU kernels in interpret mode and collects everything that could be wrong."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import literals
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax._src.pallas.mosaic.interpret import shared_memory
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import self_test
from pallas_kernels.spec import AttentionSpec, RaggedBatch
from pallas_kernels.tpu import attention, layout
from pallas_kernels.tpu.blocks import BlockSizes
from pallas_kernels.tpu.decode_memory import DecodeBlocks
from pallas_kernels.tpu.tiles import MixedBlocks
from tests.pallas_kernels.dense import Case

DMA_MODES = ("on_wait", "eager")  # as late as allowed, as early as possible: each hides what the other shows
SHAPE = 320  # tokens
TOLERANCE = {jnp.dtype(jnp.bfloat16): 0.03, jnp.dtype(jnp.float32): 2e-5}


@dataclass(frozen=True)
class Findings:
    """All must be false, or 0."""

    not_finite: bool  # anywhere in the output; padding rows included, unless what they are given is poisoned
    error: float  # of the real tokens' outputs, beyond the tolerance
    wrong_tokens: int  # whose K/V in the pages are not what they should be
    foreign_words: int  # words changed that hold no token of this step
    races: bool
    semaphores: str  # what the interpreter printed about semaphores left non-zero

    @property
    def clean(self) -> bool:
        return self == Findings(False, 0.0, 0, 0, False, "")


def small(spec: AttentionSpec, tile_queries: int | None = None) -> BlockSizes:
    """The smallest blocks, so that few tokens take several."""
    queries = layout.geometry(spec).queries_per_plane
    tile_queries = tile_queries or 128 // (queries & -queries)  # rows of a tile fill whole lanes
    q_block = max(64, tile_queries)
    return BlockSizes(
        decode=DecodeBlocks(kv_block=128, items_per_turn=2),
        mixed=MixedBlocks(
            q_block=q_block, kv_block=256, tile_rows=tile_queries * queries, tile_tokens=128, units_per_turn=2
        ),
    )


def bits(x: np.ndarray) -> np.ndarray:
    x = np.asarray(x)
    return x.view(f"uint{8 * x.itemsize}").astype(np.uint32)


def planes(keys: np.ndarray, values: np.ndarray, g: layout.Geometry) -> np.ndarray:
    """u32[len(keys), planes, 128]. JAX sees a multiple of SHAPE tokens: each number of tokens would be a program."""
    padding = ((0, -len(keys) % SHAPE), (0, 0), (0, 0))
    columns = np.asarray(layout.kv_to_columns(*(jnp.asarray(np.pad(x, padding)) for x in (keys, values)), g))
    return bits(columns.reshape(-1, g.num_planes, 128))[: len(keys)]


def filled_pages(case: Case, first_page: int) -> np.ndarray:
    """Every row's history in its pages; NaN in every other word, of live pages too (in int8 the lowest number)."""
    g = layout.geometry(case.spec)
    shape = layout.kv_pages(case.spec, case.num_pages + first_page)
    pages = np.full(shape.shape, 0x80808080 if case.spec.has_kv_scales else 0xFFFFFFFF, np.uint32)
    for row in range(len(case.rows)):
        for position, token in enumerate(planes(*case.in_pages(row, with_step=False), g)):
            put(pages, case, row, position, token, first_page)
    return pages


def put(pages: np.ndarray, case: Case, row: int, position: int, token: np.ndarray, first_page: int) -> None:
    g = layout.geometry(case.spec)
    page = np.asarray(case.batch.page_table)[row, position // g.page_size] + first_page
    word, part = divmod(position % g.page_size, g.kv_packing)
    shift, width = part * (32 // g.kv_packing), 32 // g.kv_packing
    keep = np.uint32(~(((1 << width) - 1) << shift) & 0xFFFFFFFF)
    pages[page, :, word] = (pages[page, :, word] & keep) | (token << shift)


def run(
    case: Case,
    dma_mode: str = "on_wait",
    *,
    decode_only: bool = False,
    first_page: int = 0,
    choose_blocks: bool = False,
    tile_queries: int | None = None,
    projected: bool = False,
    spec_decode: bool = False,
    poison_padding: bool = False,
) -> Findings:
    """Memory that nothing was written to is NaN: pages, blocks and scratch.

    Args:
        tile_queries: queries of the mixed kernel's tiles, in place of the fewest.
        choose_blocks: takes the block sizes that serving would take, instead of `small`.
        spec_decode: tells the kernels that every row has few tokens, and lets them choose their blocks.
        projected: gives the kernels the heads as a projection makes them, turned back, and lets them rotate.
        poison_padding: the queries, keys and values of the tokens that pad the step are NaN, too.
    """
    num_checked = case.num_real_tokens if poison_padding else case.num_tokens
    if poison_padding:
        case = replace(case, **{name: _poisoned(case, name) for name in ("queries", "keys", "values")})
    pages = filled_pages(case, first_page)
    sizes = None if choose_blocks or spec_decode else small(case.spec, tile_queries)
    step = compiled_step(case.spec, decode_only, sizes, projected, spec_decode)
    pltpu.reset_tpu_interpret_mode_state()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), copying(dma_mode):
        operands = (jnp.asarray(x) for x in (case.queries, case.keys, case.values, pages))
        out, after = step(case.batch, *operands, first_page, *case.scales)
        out, after = np.asarray(out, np.float64), np.asarray(after)
    error = np.abs(out[: case.num_real_tokens] - case.expected()).max(initial=0.0)
    races = interpreter.races
    return Findings(
        not_finite=not np.isfinite(out[:num_checked]).all(),
        error=0.0 if error <= TOLERANCE[jnp.dtype(case.spec.dtype)] else float(error),
        wrong_tokens=_wrong_tokens(case, after, first_page),
        foreign_words=_foreign_words(case, pages, after, first_page),
        races=races is not None and races.races_found,
        semaphores="\n".join(line for line in printed.getvalue().splitlines() if "non-zero count" in line),
    )


def _poisoned(case: Case, name: str) -> np.ndarray:
    tokens = getattr(case, name).copy()
    tokens[case.num_real_tokens :] = np.nan
    return tokens


@contextlib.contextmanager
def jaxs_kernel() -> Iterator[None]:
    """The kernel that JAX ships is interpreted, in all threads.

    In JAX 0.11.2, the interpreter of TPUs' memory does not reshape a reference, as this kernel does. The older one
    does, but it asks an index that is a number for its shape.
    """
    with mock.patch.object(literals.TypedInt, "shape", (), create=True):
        pltpu.set_tpu_interpret_mode(True)  # type: ignore[arg-type]  # the older interpreter
        try:
            yield
        finally:
            pltpu.set_tpu_interpret_mode(None)  # type: ignore[arg-type]


@contextlib.contextmanager
def copying(dma_mode: str) -> Iterator[None]:
    """Kernels that start here copy in this mode. Their programs do not know it: both modes share them."""
    make = shared_memory.SharedMemory
    how = {"dma_execution_mode": dma_mode}
    with mock.patch.object(shared_memory, "SharedMemory", lambda **options: make(**options | how)):
        yield


@cache
def compiled_step(
    spec: AttentionSpec,
    decode_only: bool,
    block_sizes: BlockSizes | None,
    projected: bool,
    spec_decode: bool,
) -> Callable:
    interpret = pltpu.InterpretParams(detect_races=True)

    @jax.jit
    def step(batch: RaggedBatch, queries: jax.Array, *operands: jax.Array) -> tuple[jax.Array, jax.Array]:
        keys, values, pages, first_page, *scales = operands
        metadata = attention.make_metadata(
            batch, spec, num_tokens=queries.shape[0], decode_only=decode_only, spec_decode=spec_decode
        )
        statics = {"spec": spec, "interpret": interpret, "block_sizes": block_sizes}
        if projected:
            columns, cos, sin = self_test._projection(queries, keys, values, 1)
            out, pages = attention.append_and_attend_projected(
                columns, cos, sin, pages, metadata, first_page, *scales, **statics
            )
            return out.reshape(queries.shape), pages
        return attention.append_and_attend(queries, keys, values, pages, metadata, first_page, *scales, **statics)

    return step


def _wrong_tokens(case: Case, after: np.ndarray, first_page: int) -> int:
    g = layout.geometry(case.spec)
    wrong = 0
    for row in range(len(case.rows)):
        for position, token in enumerate(planes(*case.in_pages(row), g)):
            page = np.asarray(case.batch.page_table)[row, position // g.page_size] + first_page
            word, part = divmod(position % g.page_size, g.kv_packing)
            found = after[page, :, word] >> (part * (32 // g.kv_packing)) & np.uint32((1 << (32 // g.kv_packing)) - 1)
            wrong += bool((found != token).any())
    return wrong


def _foreign_words(case: Case, before: np.ndarray, after: np.ndarray, first_page: int) -> int:
    """Words changed although no new token lies in them: the write-back moves new tokens only."""
    g = layout.geometry(case.spec)
    changed = (before != after).any(axis=(1, 3))  # [P, page_words]
    for row, length in enumerate(case.rows):
        for position in range(length.kv_len - length.query_len, length.kv_len):
            page = np.asarray(case.batch.page_table)[row, position // g.page_size] + first_page
            changed[page, position % g.page_size // g.kv_packing] = False
    return int(changed.sum())
