"""Every form of the kernels against float32, on random ragged batches, with poisoned memory, each step twice.

Each form has a process of its own: after a crash on the device all later work of a process fails.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from pallas_kernels.spec import AttentionSpec, Backend
from scripts.lab.chip.options import Options
from scripts.lab.chip.result import Result
from scripts.wiring.child import ChildError, in_child
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
FORM_LIMIT_S = 90.0
TINY = Sizes(mixed=(16, 2), decode=2, num_sequences=2, longest=60, rounds=1)


def run(options: Options, result: Result) -> None:
    """Fills the result, form by form. A form that is wrong, crashes or hangs does not end the tests of the others.

    What a run that was broken off has found right is not tested again.
    """
    before = {(form["model"], form["backend"], form["kv_dtype"]): form for form in result.before.get("forms", [])}
    result.figures["forms"] = []
    result.say("| model | backend | K/V | largest error of a row | steps, twice each | seconds |")
    result.say("|---|---|---|---|---|---|")
    for form in forms(options):
        found = before.get(form, {})
        if "problem" in found or not found:
            started = time.perf_counter()
            try:
                found = in_child(test_form, *form, options, limit_s=FORM_LIMIT_S)
            except ChildError as error:
                found = {"problem": str(error)}
            found["seconds"] = time.perf_counter() - started
        model, backend, kv_dtype = form
        result.figures["forms"].append({"model": model, "backend": str(backend), "kv_dtype": kv_dtype, **found})
        line = f"| {model} | {backend} | {kv_dtype} |"
        if "problem" in found:
            result.wrong(f"{model}, {backend}, K/V in {kv_dtype}: {found['problem']}")
            result.say(f"{line} WRONG, see above | | |")
        elif "not_supported" in found:
            result.say(f"{line} not supported: {found['not_supported']} | | |")
        else:
            result.say(f"{line} {found['largest_error']:.2%} | {found['steps']} | {found['seconds']:.1f} |")


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
    from scripts.lab.accounts.specs import make_spec

    config = resolve(model if model == "demo" else f"preset:{model}", weights=False).config
    heads = (config.num_heads, config.num_kv_heads, config.head_dim)
    page_size = default_page_size(backend, config.max_position_embeddings)
    return make_spec(heads, page_size, jnp.dtype("bfloat16"), kv_dtype)


def test_form(model: str, backend: Backend, kv_dtype: str, options: Options) -> dict[str, Any]:
    """The test of one form, in this process: its figures, or a problem, or why it is not supported."""
    import jax

    start_jax(EngineSettings(device=options.device))
    from pallas_kernels import validate
    from pallas_kernels.api import PagedAttention
    from pallas_kernels.self_test import Program, SelfTest, SelfTestError
    from scripts.lab.chip.gpu_check import poison

    sizes = TINY if options.rehearse else FULL
    spec = spec_of(model, backend, kv_dtype)
    try:
        validate.spec(spec, backend)
    except ValueError as error:
        return {"not_supported": str(error)}
    programs = [
        Program(num_tokens=sizes.mixed[0], num_rows=sizes.mixed[1]),
        Program(num_tokens=sizes.decode, num_rows=sizes.decode),
    ]
    errors, num_steps = [], 0
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
            passed = test.run(
                programs, seed=options.seed + round_, before_step=lambda: poison(jax.devices()[0]), repeat=True
            )
            errors.append(passed.largest_error)
            num_steps += passed.num_steps
    except SelfTestError as error:
        return {"problem": str(error)}
    return {"largest_error": max(errors), "steps": num_steps}
