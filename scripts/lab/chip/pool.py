"""The kernels in a pool of serving size: pages whose offsets do not fit 32 bits, and as many rows as a step may have.

A page's offset is its number times its size. In a pool of 2^31 elements or more the product needs more than 31 bits.
With 1,024 decodes, a kernel has as many copies of new tokens to their pages under way at once.
"""

from __future__ import annotations

import time
from typing import Any

from scripts.building.child import ChildError, in_child
from scripts.building.device import start_jax
from scripts.flags.settings import EngineSettings
from scripts.lab.chip.kernels import chip_backends, spec_of
from scripts.lab.chip.options import Options
from scripts.lab.chip.result import Result

FIRST_ELEMENT = 1 << 31  # of the pages that are used
ROWS, TOKENS, LONGEST = 1024, 2048, 40  # of a step; tokens of a sequence
SPARE_BYTES = 2 << 30  # for the steps' own tensors


def run(options: Options, result: Result) -> None:
    """Fills the result: the last of the models, with pages of each kind."""
    result.say("| model | backend | K/V | first page that is used | largest error of a row | seconds |")
    result.say("|---|---|---|---|---|---|")
    model = options.models[-1]
    for backend in chip_backends(options.device, rehearse=options.rehearse):
        if backend == "reference":
            continue
        for kv_dtype in ("int8",) if options.rehearse else ("bfloat16", "int8"):
            started, name = time.perf_counter(), f"{model} | {backend} | {kv_dtype}"
            try:
                found = in_child(test_pool, model, backend, kv_dtype, options, limit_s=options.limit_s)
            except ChildError as error:
                found = {"problem": str(error)}
            result.figures.setdefault("pools", []).append({"name": name, **found})
            if "problem" in found:
                result.wrong(f"{name.replace(' |', ',')}: {found['problem']}")
            if "needed" in found:
                result.say(f"| {name} | {found['needed']} | | |")
                continue
            largest = f"{found['largest_error']:.2%}" if "largest_error" in found else "WRONG, see above"
            result.say(f"| {name} | {found.get('first_page', '')} | {largest} | {time.perf_counter() - started:.1f} |")


def first_page_of(elements: int) -> int:
    """The first page, of so many elements each, behind `FIRST_ELEMENT`."""
    return FIRST_ELEMENT // elements + 1


def test_pool(model: str, backend: Any, kv_dtype: str, options: Options) -> dict[str, Any]:
    """The test of one kind of pages, in this process: figures, or a problem, or the memory that is needed."""
    import jax

    start_jax(EngineSettings(device=options.device))
    from pallas_kernels.api import PagedAttention
    from pallas_kernels.self_test import Program, SelfTest, SelfTestError

    spec = spec_of(model, backend, kv_dtype)
    attention = PagedAttention(spec, backend)
    first_page = 7 if options.rehearse else first_page_of(attention.kv_pages(1).size)
    rows, tokens = (2, 16) if options.rehearse else (ROWS, TOKENS)
    needed = (first_page + rows * -(-LONGEST // spec.page_size)) * attention.page_bytes() + SPARE_BYTES
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    if limit is not None and needed > limit:
        return {"needed": f"needs {needed / 2**30:.0f} GiB of {limit / 2**30:.0f}"}
    test = SelfTest(
        attention,
        pages_per_seq=-(-LONGEST // spec.page_size),
        num_sequences=rows,
        longest=LONGEST,
        first_page=first_page,
        compiler_options={"xla_backend_optimization_level": 0} if options.rehearse else None,
    )
    programs = [Program(num_tokens=tokens, num_rows=rows), Program(num_tokens=rows, num_rows=rows)]
    try:
        passed = test.run(programs, seed=options.seed)
    except SelfTestError as error:
        return {"problem": str(error)}
    return {"first_page": first_page, "largest_error": passed.largest_error, "steps": passed.num_steps}
