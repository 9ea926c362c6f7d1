"""What XLA sets anew in the CUDA graphs of steps, by its own log, and the CPU time of a dispatch."""

from __future__ import annotations

import gc
import os
import re
import tempfile
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from batcher.step import Bucket, Variant
from scripts.building.runner import build_runner
from scripts.lab.chip.parts import Options, Result
from scripts.lab.step_timing import MAX_STEPS_AHEAD, admit, full_step

# XLA logs each node that it makes or sets. It reads the variables when it first logs.
LOG = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "cuda_command_buffer=2"}
UPDATES = {"kernels": "kernel node params", "child graphs": "child node params", "copies": "mem"}
CONTEXT, MAX_MODEL_LEN = 512, 1024
STEPS, SETTLING = 22, 4
_SET = re.compile(r"\] Set (\w+ node params|mem\w+(?: \w+)? node params)(?:.*; kernel: ([^;\s]+))?")
_NODE = "Add kernel node to a graph"


class Case(NamedTuple):
    """A step of decodes."""

    model: str
    num_rows: int
    variant: Variant
    num_models: int = 1  # models that take turns

    def __str__(self) -> str:
        models = f", {self.num_models} models in turns" if self.num_models > 1 else ""
        return f"{self.model}, {self.num_rows} rows, {self.variant}{models}"


def cases(options: Options) -> list[Case]:
    """The smallest of the models with few rows, where the host matters most, and the largest with many."""
    few, many = (2, 2) if options.rehearse else (8, 64)
    small, large = options.models[0], options.models[-1]
    return list(
        dict.fromkeys(
            [
                Case(small, few, Variant.GREEDY),
                Case(small, few, Variant.SAMPLE),
                Case(small, few, Variant.GREEDY, num_models=2),
                Case(large, many, Variant.GREEDY),
            ]
        )
    )


def run(options: Options, result: Result) -> None:
    """Fills the result. It is wrong if a child graph is set anew: each is captured again, which costs most. It is also
    wrong if a graph is made after the warm-up: a request would wait for it."""
    if options.device == "tpu":
        result.say("Not counted: CUDA graphs are NVIDIA's.")
        return
    os.environ.update(LOG)
    columns = {**dict.fromkeys(UPDATES, ".0f"), "most nodes": ".0f", "dispatch, us": ".0f", "its CPU, us": ".0f"}
    table = result.table({"step": "", **columns, "kernels that are set": ""})

    def show(name: str, found: dict[str, Any]) -> None:
        kinds = [found["set"][kind] for kind in UPDATES]
        times = found["wall_us"], found["cpu_us"]
        table.row(name, *kinds, found["most"], *times, ", ".join(found["names"]) or "none")
        if found["set"]["child graphs"]:
            result.wrong(f"{name}: a step sets {found['set']['child graphs']:.0f} child graphs anew")
        if found["made"]:
            result.wrong(f"{name}: {found['made']} nodes of graphs were made after the warm-up")

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "xla.log" if result.kept_in is None else result.kept_in.with_name("xla.log")
        log = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_APPEND)
        os.dup2(log, 2)
        result.measure({str(case): partial(measure, case, options, path) for case in cases(options)}, show)
    result.say("")
    result.say(f"Means and medians of {STEPS - SETTLING} steps, {MAX_STEPS_AHEAD} in flight, with XLA's log on.")


def measure(case: Case, options: Options, log: Path) -> dict[str, Any]:
    """The figures of a step. `log` is what this process has as its standard error.

    Raises RuntimeError if XLA has made no graph on a GPU.
    """
    gc.collect()  # the runner of the case before leaves the memory
    begun = log.stat().st_size
    settings = options.settings(
        case.model,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=case.num_rows,
        num_pages=1024,
        max_num_batched_tokens=16 if options.rehearse else 2048,
        self_test="kept" if options.rehearse else "never",  # the outputs are not read
    )
    runner = build_runner(settings, print).runner
    for model in range(1, case.num_models):
        runner._others[model] = jax.tree.map(jnp.copy, (runner.weights, runner._kv_scales))
    bucket = Bucket(case.num_rows, case.num_rows, case.variant)
    runner.warm_up([bucket], print)
    warm = log.stat().st_size
    admit(runner, bucket, CONTEXT, {"temperature": float(case.variant is Variant.SAMPLE), "top_p": 1.0, "top_k": 0})
    ahead, wall_us, cpu_us, ends = [], [], [], []
    for number in range(STEPS):
        step = replace(full_step(bucket, runner.capacity(), CONTEXT), model=number % case.num_models)
        begin, cpu = time.perf_counter(), time.thread_time()
        ahead.append(runner.execute(step))
        cpu_us.append((time.thread_time() - cpu) * 1e6)
        wall_us.append((time.perf_counter() - begin) * 1e6)
        ends.append(log.stat().st_size)
        if len(ahead) == MAX_STEPS_AHEAD:
            ahead.pop(0).result()
    for handle in ahead:
        handle.result()
    text = log.read_bytes()
    if options.device == "cuda" and _NODE.encode() not in text[begun:]:
        raise RuntimeError(f"XLA's log has no CUDA graph: see {log}")
    made = text[warm:].count(_NODE.encode())
    steps = [read_log(text[a:b].decode(errors="replace")) for a, b in pairwise(ends)][SETTLING - 1 :]
    return {
        "set": {kind: sum(found[kind] for found, _ in steps) / len(steps) for kind in UPDATES},
        "made": made,
        "most": max(found.total() for found, _ in steps),
        "names": sorted({name for _, names in steps for name in names}),
        "wall_us": median(wall_us[SETTLING:]),
        "cpu_us": median(cpu_us[SETTLING:]),
    }


def read_log(text: str) -> tuple[Counter[str], Counter[str]]:
    """How many nodes of each kind XLA's log says it has set, and of which kernels."""
    kinds, names = Counter[str](), Counter[str]()
    for what, kernel in _SET.findall(text):
        kinds[next((kind for kind, begins in UPDATES.items() if what.startswith(begins)), what)] += 1
        if kernel:
            names[kernel] += 1
    return kinds, names
