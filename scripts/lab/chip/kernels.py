"""Every form of the kernels against float32, by the self-test that an engine runs at its start: random ragged batches,
poisoned memory, and each step twice. And the same in a pool of serving size.

Each form has a process of its own: after a crash on the device all later work of a process fails. A GPU runs a few of
these processes at once, each with its part of the memory: most of their time goes to compilers and to numpy.

A page's offset is its number times its size. In a pool of 2^31 elements or more the product needs more than 31 bits.
With 1,024 decodes, a kernel has as many copies of new tokens to their pages under way at once.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from model.execution.device_memory import device_memory
from model.loading.source import resolve
from pallas_kernels import validate
from pallas_kernels.api import PagedAttention, candidates
from pallas_kernels.backends import default_page_size
from pallas_kernels.chips import GPU_POOL_SHARE
from pallas_kernels.self_test import Program, SelfTest, SelfTestError
from pallas_kernels.spec import AttentionSpec, Backend
from scripts.building.child import ChildError, in_child
from scripts.building.device import start_jax
from scripts.flags.settings import EngineSettings
from scripts.lab.accounts.specs import make_spec
from scripts.lab.chip.parts import Options, Result


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The extent of the tests of one form."""

    programs: Sequence[Program]
    num_sequences: int
    longest: int  # tokens of a sequence
    rounds: int = 1  # each of five ragged batches


def _sizes(tokens: int, rows: int, decode: int, **others: int) -> Sizes:
    mixed = Program(num_tokens=tokens, num_rows=rows)
    return Sizes(programs=(mixed, Program(num_tokens=decode, num_rows=decode)), **others)


FULL = _sizes(2048, 64, 64, num_sequences=4, longest=2000, rounds=3)
TINY = _sizes(16, 2, 2, num_sequences=2, longest=60)
POOL = _sizes(2048, 1024, 1024, num_sequences=1024, longest=40)
TINY_POOL = _sizes(16, 2, 2, num_sequences=2, longest=40)
FORM_LIMIT_S = 90.0
AT_ONCE = 4  # forms that a GPU tests at a time; a TPU belongs to one process
CORES_EACH = 2
FIRST_ELEMENT = 1 << 31  # of a large pool's pages that are used
SPARE_BYTES = 2 << 30  # in a large pool, for the steps' own tensors
POISON_BYTES = 1 << 30


def run(options: Options, result: Result) -> None:
    """Fills the result, form by form. A form that is wrong, crashes or hangs does not end the tests of the others.

    What a run that was broken off has found right is not tested again.
    """
    before = {(form["model"], form["backend"], form["kv_dtype"]): form for form in result.before.get("forms", [])}
    result.figures["forms"] = []
    columns = {"largest error of a row": ".2%", "steps, twice each": ">", "seconds": ".1f"}
    table = result.table({"model": "", "backend": "", "K/V": "", **columns})

    def test(form: tuple[str, Backend, str]) -> dict[str, Any]:
        found = before.get(form, {})
        if found and "problem" not in found:
            return found
        return _in_child(test_form, *form, options, True, limit_s=FORM_LIMIT_S, numpy_threads=max(1, cores // workers))

    cores = os.cpu_count() or 1
    workers = max(1, min(AT_ONCE, cores // CORES_EACH)) if options.device == "cuda" else 1
    if workers > 1:
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{GPU_POOL_SHARE / workers:.3f}")
    with ThreadPoolExecutor(workers) as threads:
        for (model, backend, kv_dtype), found in zip(forms(options), threads.map(test, forms(options)), strict=True):
            result.figures["forms"].append({"model": model, "backend": str(backend), "kv_dtype": kv_dtype, **found})
            if "problem" in found:
                result.wrong(f"{model}, {backend}, K/V in {kv_dtype}: {found['problem']}")
            error = found.get("not_supported") if "problem" not in found else "WRONG, see above"
            shown = error or found["largest_error"], found.get("steps"), found["seconds"]
            table.row(model, str(backend), kv_dtype, *shown)


def run_in_a_large_pool(options: Options, result: Result) -> None:
    """Fills the result: the last of the models, with pages of each kind."""
    columns = {"first page that is used": ">", "largest error of a row": ".2%", "seconds": ".1f"}
    table = result.table({"model": "", "backend": "", "K/V": "", **columns})
    model = options.models[-1]
    result.figures["pools"] = []
    backends = chip_backends(options.device, rehearse=options.rehearse)
    for backend in backends[:1] if options.rehearse else backends:
        for kv_dtype in () if backend == "reference" else ("int8",) if options.rehearse else ("bfloat16", "int8"):
            found = _in_child(test_pool, model, backend, kv_dtype, options, limit_s=options.limit_s)
            result.figures["pools"].append({"name": f"{model} | {backend} | {kv_dtype}", **found})
            if "problem" in found:
                result.wrong(f"{model}, {backend}, {kv_dtype}: {found['problem']}")
            fault = "WRONG, see above" if "problem" in found else found.get("needed")
            error = fault or found["largest_error"]
            table.row(model, str(backend), kv_dtype, found.get("first_page"), error, found["seconds"])


def _in_child(
    work: Callable[..., dict[str, Any]], *arguments: Any, limit_s: float, numpy_threads: int | None = None
) -> dict[str, Any]:
    """What the test has found, or as a problem how its process ended; and its seconds."""
    started = time.perf_counter()
    try:
        found = in_child(work, *arguments, limit_s=limit_s, numpy_threads=numpy_threads)
    except ChildError as error:
        found = {"problem": str(error)}
    return found | {"seconds": time.perf_counter() - started}


def forms(options: Options) -> list[tuple[str, Backend, str]]:
    """Model, backend and type of K/V, the likeliest to serve first: a run that is broken off has tested those.

    A backend serves if those before it fail. K/V have bfloat16 unless a flag says otherwise.
    """
    return [
        (model, backend, kv_dtype)
        for backend in chip_backends(options.device, rehearse=options.rehearse)
        for kv_dtype in _kv_dtypes(backend, rehearse=options.rehearse)
        for model in reversed(options.models)
    ]


def chip_backends(platform: str, *, rehearse: bool) -> list[Backend]:
    """The backends that may serve on `platform`; in a rehearsal, the kernels of chips, interpreted."""
    if rehearse:
        return [Backend.TPU_INTERPRET, Backend.GPU_INTERPRET, Backend.GPU_MMA_INTERPRET]
    return list(candidates("auto", platform))


def _kv_dtypes(backend: Backend, *, rehearse: bool) -> tuple[str, ...]:
    if rehearse:
        return ("bfloat16",) if backend is Backend.GPU_INTERPRET else ("int8",)
    return ("bfloat16", "int8", *(["float8_e4m3fn"] if backend.startswith("gpu") else []))


def spec_of(model: str, backend: Backend, kv_dtype: str) -> AttentionSpec:
    """The attention of `model`, which the backend may not support. Raises ValueError if there is no such model."""
    config = resolve(model if model == "demo" else f"preset:{model}", weights=False).config
    heads = (config.num_heads, config.num_kv_heads, config.head_dim)
    page_size = default_page_size(backend, config.max_position_embeddings)
    return make_spec(heads, page_size, jnp.dtype("bfloat16"), kv_dtype)


def test_form(model: str, backend: Backend, kv_dtype: str, options: Options, poisons: bool) -> dict[str, Any]:
    """The test of one form, in this process: its figures, or a problem, or why it is not supported."""
    start_jax(EngineSettings(device=options.device))
    spec = spec_of(model, backend, kv_dtype)
    try:
        validate.spec(spec, backend)
    except ValueError as error:
        return {"not_supported": str(error)}
    return self_test(PagedAttention(spec, backend), TINY if options.rehearse else FULL, options.seed, poisons=poisons)


def test_pool(model: str, backend: Backend, kv_dtype: str, options: Options) -> dict[str, Any]:
    """The test of one kind of pages, in this process: figures, or a problem, or the memory that is needed."""
    start_jax(EngineSettings(device=options.device))
    attention = PagedAttention(spec_of(model, backend, kv_dtype), backend)
    first_page = 7 if options.rehearse else first_page_of(attention.kv_pages(1).size)
    sizes = TINY_POOL if options.rehearse else POOL
    pages = first_page + sizes.num_sequences * -(-sizes.longest // attention.spec.page_size)
    needed, limit = pages * attention.page_bytes() + SPARE_BYTES, memory_limit()
    if limit is not None and needed > limit:
        return {"needed": f"needs {needed / 2**30:.0f} GiB of {limit / 2**30:.0f}"}
    return {"first_page": first_page} | self_test(attention, sizes, options.seed, first_page=first_page)


def memory_limit() -> int | None:
    """Bytes of a chip's memory; None for a CPU."""
    memory = device_memory(jax.devices()[0])
    return None if memory.is_host else memory.total


def first_page_of(elements: int) -> int:
    """The first page, of so many elements each, behind `FIRST_ELEMENT`."""
    return FIRST_ELEMENT // elements + 1


def self_test(
    attention: PagedAttention, sizes: Sizes, seed: int, *, first_page: int = 0, poisons: bool = True
) -> dict[str, Any]:
    """The largest error and the number of steps, or the problem. In a pool of serving size (`first_page`), there is no
    room for poison and for second results."""
    try:
        test = SelfTest(
            attention,
            pages_per_seq=-(-sizes.longest // attention.spec.page_size),
            num_sequences=sizes.num_sequences,
            longest=sizes.longest,
            first_page=first_page,
            # Half of the seconds of an interpreted program are the compiler's.
            compiler_options={"xla_backend_optimization_level": 0} if attention.backend.is_interpreted else None,
        )
        before_step = (lambda: None) if first_page or not poisons else (lambda: poison(jax.devices()[0]))
        passed = [
            test.run(sizes.programs, seed=seed + round_, before_step=before_step, repeat=not first_page)
            for round_ in range(sizes.rounds)
        ]
    except SelfTestError as error:
        return {"problem": str(error)}
    return {"largest_error": max(p.largest_error for p in passed), "steps": sum(p.num_steps for p in passed)}


def poison(device: jax.Device) -> None:
    """Fills most of the device's free memory with NaN and frees it: the next outputs then begin as NaN.

    On a CPU, one array is filled.
    """
    memory = device_memory(device)
    free = 0 if memory.is_host else memory.free
    arrays = []
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # the free memory is fragmented: fill what can be allocated
        for _ in range(max(1, free * 9 // 10 // POISON_BYTES)):
            size = (POISON_BYTES if free else 1 << 20) // 4
            arrays.append(jax.block_until_ready(jnp.full(size, jnp.nan, jnp.float32)))
    for array in arrays:
        array.delete()
