"""Compiles steps of a plan for chips that are not here, and prints what the compiler says: a process of its own.

It reads the question of `scripts.lab.planning.compiled` from stdin and prints one JSON object for each program. A
process compiles for one target only, and libtpu must see its environment before jax is imported.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import sys
import time
from typing import Any

from model.compiling.compiler_options import compiler_options
from model.execution.step_programs import StepPrograms
from model.network.packed import pack_for_tpu
from model.network.sharding import make_mesh
from scripts.building.limits import bucket_config, runner_config
from scripts.lab.accounts.targets import gpu_target, tpu_target
from scripts.lab.planning.compiled import Question
from scripts.lab.planning.memory import size_up


def main() -> None:
    """The command."""
    asked: Question = pickle.load(sys.stdin.buffer)  # from the process that has started this one
    target, chips, settings = asked.target, asked.chips, asked.settings
    gpu = gpu_target(target.chip.name) if asked.topology is None else None
    devices = gpu.devices(chips) if gpu else tpu_target(str(asked.topology)).devices()[:chips]
    mesh = make_mesh(chips, devices)
    buckets = bucket_config(settings, target.platform)
    for num_layers in asked.depths:
        sizes = size_up(settings, target, chips, mesh=mesh, num_layers=num_layers)
        if target.platform == "tpu":
            pack_for_tpu(sizes.model, mesh)
        limits = runner_config(settings, buckets, sizes.max_model_len)
        described = StepPrograms(sizes.model, sizes.attention, limits, asked.num_pages, None)
        begin = time.process_time()
        with contextlib.nullcontext() if gpu is None else gpu.compiling(mesh):
            program = described.step(asked.bucket).lower()
            memory: Any = program.compile(compiler_options=compiler_options(target.platform)).memory_analysis()
        answer = {
            "num_layers": num_layers,
            "arguments": memory.argument_size_in_bytes,
            "temporaries": memory.temp_size_in_bytes,
            "code": memory.generated_code_size_in_bytes,
            "cpu_s": time.process_time() - begin,
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
