"""Runs the GPU kernels in interpret mode, with race detection, and collects everything that could be wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter
from jax._src.pallas.mosaic_gpu.interpret.race_detection_state import GPURaceDetectionState as RaceDetector
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import quantised
from pallas_kernels.gpu import attention, decode, device, prefill_mma, prefill_tile, ring, tuning
from pallas_kernels.gpu.parts import Parts
from pallas_kernels.gpu.work_list import ITEM_NUM_BLOCKS
from pallas_kernels.spec import AttentionSpec, RaggedBatch
from tests.pallas_kernels.dense import Case

HOPPER = device.INTERPRETED
BLACKWELL = device.Gpu(arch=(10, 0), num_multiprocessors=2)  # the mma kernels, with TMA
AMPERE = device.Gpu(arch=(8, 0), num_multiprocessors=2)  # the mma kernels, with cp.async
ADA = device.Gpu(arch=(8, 9), num_multiprocessors=2)  # the same, with fp8 and smaller blocks
# One multiprocessor: its CTA, or its two of the mma prefill, take all tiles, one after the other.
ONE_HOPPER = device.Gpu(arch=(9, 0), num_multiprocessors=1)
ONE_BLACKWELL = device.Gpu(arch=(10, 0), num_multiprocessors=1)
COPYING_THREADS = 64  # copies of the same thread are in order: with few threads, a race of two copies may go unseen
SHORTEST_PART = 64  # keys of a decode: short rows are cut, too
TOLERANCE = 0.03  # bfloat16 in, float32 inside, probabilities rounded to bfloat16


@dataclass(frozen=True)
class Findings:
    """All must be false, or 0."""

    not_finite: bool = False  # anywhere in the output, padding rows included
    error: float = 0.0  # of the real tokens' outputs, beyond the tolerance
    wrong_pages: bool = False  # something else than this step's tokens changed, or they are wrong
    races: bool = False
    stopped: str = ""  # the interpreter gave up


def run(
    case: Case,
    gpu: device.Gpu = HOPPER,
    *,
    decode_only: bool = False,
    spec_decode: bool = False,
    first_page: int = 0,
    parts: Parts | None = None,
) -> Findings:
    """`parts`: how chunks are cut, instead of the chip's own way."""
    form = {"decode_only": decode_only, "spec_decode": spec_decode, "parts": parts}
    with recorded_races() as kernels:
        output, pages = outputs(case, gpu, **form, first_page=first_page)
    metadata = jax.eval_shape(lambda: metadata_of(case, gpu, **form))
    cuts = [parts.num_slots > 0 for parts in (metadata.decode_parts, metadata.prefill_parts)]
    assert len(kernels) == (not spec_decode) + (not decode_only) + any(cuts)
    expected = case.expected()
    error = np.abs(output[: case.num_real_tokens].astype(np.float64) - expected).max(initial=0.0)
    wanted = filled_pages(case, first_page, with_step=True)
    return Findings(
        not_finite=not np.isfinite(output.astype(np.float32)).all(),
        error=0.0 if error <= TOLERANCE else float(error),  # a NaN is beyond every tolerance
        wrong_pages=pages.tobytes() != wanted.tobytes(),
        races=any(kernel.races_found for kernel in kernels),
    )


def metadata_of(
    case: Case, gpu: device.Gpu, *, decode_only: bool, spec_decode: bool = False, parts: Parts | None = None
) -> attention.AttentionMetadata:
    form = {"num_tokens": case.num_tokens, "decode_only": decode_only, "spec_decode": spec_decode}
    with on(gpu, parts):
        return jax.jit(lambda batch: attention.make_metadata(batch, case.spec, **form))(case.batch)  # one program


def longest_decode_item(case: Case, gpu: device.Gpu) -> int:
    """How many blocks, one after the other, pass through the ring of a CTA of the decode kernel at most."""
    return int(metadata_of(case, gpu, decode_only=True).decode.items[:, ITEM_NUM_BLOCKS].max())


def decode_rounds(case: Case, gpu: device.Gpu) -> int:
    """How many items, one after the other, a CTA of the decode kernel takes at most."""
    units = int(metadata_of(case, gpu, decode_only=True).decode.num_items[0]) * case.spec.num_kv_heads
    return -(-units // tuning.decode_ctas(gpu, case.spec))


def prefill_rounds(case: Case, gpu: device.Gpu) -> int:
    """How many tiles, one after the other, a CTA of the prefill kernel takes at most."""
    group = case.spec.num_query_heads // case.spec.num_kv_heads
    num_tiles = int(metadata_of(case, gpu, decode_only=False).prefill.num_tiles[0])
    units = num_tiles * case.spec.num_kv_heads * prefill_tile.TileShape(group).tiles_per_group
    return -(-units // tuning.prefill_ctas(gpu, case.spec))


@contextlib.contextmanager
def recorded_races() -> Iterator[list[Any]]:
    """The race detectors of all kernels that ran: the interpreter keeps the last one's only."""
    kernels: list[Any] = []

    def record(*args: Any, **kwargs: Any) -> Any:
        kernels.append(RaceDetector(*args, **kwargs))
        return kernels[-1]

    with mock.patch.object(interpreter.gpu_callbacks, "GPURaceDetectionState", record):
        yield kernels


@contextlib.contextmanager
def on(gpu: device.Gpu, parts: Parts | None) -> Iterator[None]:
    """Kernels traced here are for `gpu`, and cut chunks as `parts` says, or as the chip does."""
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(device, "current", return_value=gpu))
        patches.enter_context(mock.patch.object(tuning, "MIN_DECODE_KEYS", SHORTEST_PART))
        if parts is not None:
            patches.enter_context(mock.patch.object(tuning, "prefill_parts", return_value=parts))
        if not gpu.has_tma:
            patches.enter_context(cp_async())
        yield


@contextlib.contextmanager
def cp_async() -> Iterator[None]:
    """Stands in for copies by cp.async, which the interpreter does not have, while kernels are traced.

    Such a copy becomes one by TMA, which arrives at a barrier that the kernel does not see: one for the ring's copies,
    one for the queries'. A wait for all copies becomes a wait at it and a fence, since the chip's wait ends with a
    barrier of the threads. So a missing wait is a race here as well, and so is a copy to what is still read.
    """
    arrived: dict[str, Any] = {}

    def kernel(body: Any, *, scratch_types: dict[str, Any], **options: Any) -> Any:
        counts = {"ring_arrived": 2 * body.blocks.copies}
        if "q_smem" in scratch_types:
            counts["queries_arrived"] = body.shape.heads

        def with_barriers(*arrays: Any, **scratch: Any) -> None:
            arrived.update((name, scratch.pop(name)) for name in counts)
            body(*arrays, **scratch)

        barriers = {name: plgpu.Barrier(num_arrivals=count) for name, count in counts.items()}
        return plgpu.kernel(with_barriers, scratch_types=scratch_types | barriers, **options)

    def of(name: str) -> SimpleNamespace:
        def copy(source: Any, place: Any, *, oob_mode: Any) -> None:
            plgpu.copy_gmem_to_smem(source, place, arrived[name], oob_mode=oob_mode)

        def wait(allowed: int) -> None:
            assert allowed == 0  # the barriers count whole runs of copies
            plgpu.barrier_wait(arrived[name])
            plgpu.commit_smem()

        own = {"kernel": kernel, "copy_gmem_to_smem": copy, "wait_gmem_to_smem": wait}
        return SimpleNamespace(**vars(plgpu) | own)

    ring_copies, query_copies = of("ring_arrived"), of("queries_arrived")
    with contextlib.ExitStack() as patches:
        for module in (ring, decode):
            patches.enter_context(mock.patch.object(module, "plgpu", ring_copies))
        for module in (prefill_tile, prefill_mma):
            patches.enter_context(mock.patch.object(module, "plgpu", query_copies))
        yield


def outputs(
    case: Case,
    gpu: device.Gpu,
    *,
    decode_only: bool = False,
    spec_decode: bool = False,
    first_page: int = 0,
    parts: Parts | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    interpreter.gpu_callbacks.reset_gpu_interpret_mode_state()
    step = compiled_step(case.spec, gpu, decode_only, spec_decode, parts)
    operands = (case.queries, case.keys, case.values, filled_pages(case, first_page), first_page, *case.scales)
    with on(gpu, parts):
        output, pages = step(case.batch, *(jnp.asarray(x) for x in operands))
        return np.asarray(output), np.asarray(pages)


@cache
def compiled_step(
    spec: AttentionSpec, gpu: device.Gpu, decode_only: bool, spec_decode: bool, parts: Parts | None
) -> Callable:
    del gpu, parts  # tell programs apart; the kernels ask for them while they are traced
    interpret = plgpu.InterpretGPUParams(detect_races=True, num_tma_threads_per_device=COPYING_THREADS)

    @jax.jit
    def step(batch: RaggedBatch, queries: jax.Array, *operands: jax.Array) -> tuple[jax.Array, jax.Array]:
        keys, values, pages, first_page, *scales = operands
        metadata = attention.make_metadata(
            batch, spec, num_tokens=queries.shape[0], decode_only=decode_only, spec_decode=spec_decode
        )
        operation = partial(attention.append_and_attend, spec=spec, interpret=interpret)
        if scales:
            operation = quantised.with_scales(operation, spec.kv_dtype)
        return operation(queries, keys, values, pages, metadata, first_page, *scales)

    return step


def filled_pages(case: Case, first_page: int, *, with_step: bool = False) -> np.ndarray:
    """Every row's history in its pages; everywhere else, that is page 0, free pages and the rest of a last page, NaN
    (of int8 the lowest number)."""
    spec = case.spec
    shape = (case.num_pages + first_page, 2, spec.num_kv_heads, spec.page_size, spec.head_dim)
    poison = -128 if spec.kv_dtype == jnp.int8 else np.nan
    pages = np.full(shape, poison, jnp.dtype(spec.kv_dtype))
    table = np.asarray(case.batch.page_table)
    for row in range(len(case.rows)):
        keys, values = case.in_pages(row, with_step=with_step)
        position = np.arange(len(keys))
        page = table[row, position // spec.page_size] + first_page
        pages[page, 0, :, position % spec.page_size] = keys
        pages[page, 1, :, position % spec.page_size] = values
    return pages
