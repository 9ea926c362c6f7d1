"""The attention kernels' shares of the copy bandwidth and of the matrix peak, next to other implementations."""

from __future__ import annotations

import traceback
from dataclasses import replace
from typing import Any

from model.inputs.words import described
from pallas_kernels.spec import Backend
from scripts.building.device import start_jax
from scripts.flags.settings import EngineSettings
from scripts.lab.chip.kernels import chip_backends, spec_of
from scripts.lab.chip.options import Options
from scripts.lab.chip.result import Result


def run(options: Options, result: Result) -> None:
    """Fills the result: a table for each form of the kernels, the first one with the other implementations."""
    platform = start_jax(EngineSettings(device=options.device))
    from scripts.lab.chip import device_gpu

    model = options.models[-1]
    for index, backend in enumerate(chip_backends(platform, rehearse=options.rehearse)):
        if backend is Backend.REFERENCE:
            continue
        spec = spec_of(model, backend, "bfloat16")
        plan = _plan(backend, spec.page_size, rehearse=options.rehearse)
        heads = (spec.num_query_heads, spec.num_kv_heads, spec.head_dim)
        if index and not options.rehearse:
            plan = replace(plan, peers={})
        try:
            figures, _ = device_gpu.measure(platform, model, heads, backend=backend, plan=plan)
        except Exception as error:  # a form that does not run must not hide the others' figures
            traceback.print_exc()
            result.status = "failed"
            result.problems.append(f"{backend}: {described(error)}")
            continue
        result.figures[str(backend)] = figures
        for line in [f"### {backend}", "", *device_gpu.tables(figures), ""]:
            result.say(line)


def _plan(backend: Backend, page_size: int, *, rehearse: bool) -> Any:
    from scripts.lab.chip import device_gpu, gpu_peers, tpu_peers

    peers = tpu_peers.PEERS if backend.startswith("tpu") else gpu_peers.PEERS
    plan = device_gpu.Plan(variants=[], checked=[], peers=peers, page_size=page_size, batches=5, calls=5)
    if not rehearse:
        ragged = "1 x 64k + 63 x 512"  # no peer takes it
        return replace(plan, decodes={name: lens for name, lens in plan.decodes.items() if name != ragged})
    return replace(
        plan, decodes={"64 x 2k": [20]}, prefills={"1 x 8k": [16]}, short_chunks={}, layers=1, batches=1,
        calls=1, copy_bytes=1 << 12, product_size=16,
    )  # fmt: skip
