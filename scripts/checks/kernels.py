"""Every form of the kernels against float32, on random ragged batches, with poisoned memory, each step twice."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pallas_kernels.spec import AttentionSpec, Backend
from scripts.checks.options import Options
from scripts.checks.result import Result
from scripts.wiring.device import start_jax
from scripts.wiring.settings import EngineSettings


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The extent of the tests of one form."""

    mixed: tuple[int, int]  # tokens, rows
    decode: int  # rows
    num_sequences: int
    longest: int  # tokens
    rounds: int  # each of five ragged batches


FULL = Sizes(mixed=(512, 64), decode=64, num_sequences=4, longest=2000, rounds=4)
TINY = Sizes(mixed=(16, 2), decode=2, num_sequences=2, longest=60, rounds=1)


def run(options: Options, result: Result) -> None:
    """Fills the result; a wrong number of one form does not end the tests of the others."""
    import jax

    platform = start_jax(EngineSettings(device=options.device))
    from pallas_kernels import validate
    from scripts.benchmarks.device.gpu_check import poison

    sizes = TINY if options.rehearse else FULL
    result.say("| model | backend | K/V | largest error of a row | steps, twice each | seconds |")
    result.say("|---|---|---|---|---|---|")
    for model in options.models:
        for backend in chip_backends(platform, rehearse=options.rehearse):
            for kv_dtype in _kv_dtypes(backend, rehearse=options.rehearse):
                spec = spec_of(model, backend, kv_dtype)
                try:
                    validate.spec(spec, backend)
                except ValueError as error:
                    result.say(f"| {model} | {backend} | {kv_dtype} | not supported: {error} | | |")
                    continue
                _test(model, backend, spec, sizes, options, result, lambda: poison(jax.devices()[0]))


def chip_backends(platform: str, *, rehearse: bool) -> list[Backend]:
    """The backends that may serve on `platform`; in a rehearsal, the kernels of chips, interpreted."""
    from pallas_kernels.api import candidates

    if rehearse:
        return [Backend.TPU_INTERPRET, Backend.GPU_INTERPRET, Backend.GPU_MMA_INTERPRET]
    return list(candidates("auto", platform))


def _kv_dtypes(backend: Backend, *, rehearse: bool) -> tuple[str, ...]:
    if rehearse:
        return ("bfloat16",) if backend is Backend.GPU_INTERPRET else ("int8",)
    return ("bfloat16", "int8", *(["float8_e4m3fn"] if backend.startswith("gpu") else []))


def spec_of(model: str, backend: Backend, kv_dtype: str) -> AttentionSpec:
    """The attention of `model`, which the backend may not support. Raises ValueError if there is no such model."""
    import jax.numpy as jnp

    from model.loading.source import resolve
    from pallas_kernels.layout import default_page_size

    config = resolve(model if model == "demo" else f"preset:{model}", weights=False).config
    return AttentionSpec(
        num_query_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=default_page_size(backend, config.max_position_embeddings),
        dtype=jnp.dtype("bfloat16"),
        kv_dtype=jnp.dtype(kv_dtype),
    )


def _test(
    model: str,
    backend: Backend,
    spec: AttentionSpec,
    sizes: Sizes,
    options: Options,
    result: Result,
    poison: Callable[[], None],
) -> None:
    from pallas_kernels.api import PagedAttention
    from pallas_kernels.self_test import Program, SelfTest, SelfTestError

    programs = [
        Program(num_tokens=sizes.mixed[0], num_rows=sizes.mixed[1]),
        Program(num_tokens=sizes.decode, num_rows=sizes.decode),
    ]
    started, errors, num_steps = time.perf_counter(), [], 0
    figures: dict[str, Any] = {"model": model, "backend": str(backend), "kv_dtype": str(spec.kv_dtype)}
    result.figures.setdefault("forms", []).append(figures)
    try:
        test = SelfTest(
            PagedAttention(spec, backend),
            pages_per_seq=-(-sizes.longest // spec.page_size),
            num_sequences=sizes.num_sequences,
            longest=sizes.longest,
            # Half of the seconds of an interpreted program are the compiler's.
            compiler_options={"xla_backend_optimization_level": 0} if options.rehearse else None,
        )
        for round_ in range(sizes.rounds):
            passed = test.run(programs, seed=options.seed + round_, before_step=poison, repeat=True)
            errors.append(passed.largest_error)
            num_steps += passed.num_steps
    except SelfTestError as error:
        result.wrong(f"{model}, {backend}, K/V in {spec.kv_dtype}: {error}")
        figures |= {"problem": str(error)}
        result.say(f"| {model} | {backend} | {spec.kv_dtype} | WRONG, see above | | |")
        return
    figures |= {"largest_error": max(errors), "steps": num_steps}
    seconds = time.perf_counter() - started
    result.say(f"| {model} | {backend} | {spec.kv_dtype} | {max(errors):.2%} | {num_steps} | {seconds:.1f} |")
