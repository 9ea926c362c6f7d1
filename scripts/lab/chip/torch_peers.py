"""PyTorch and transformers on the same card in the same run, where this machine's own Python has them.

This program does not depend on PyTorch: where it is missing, the report says so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from model.loading.source import resolve
from scripts.building.child import how_it_ended
from scripts.lab.chip.parts import ROOT, Options, Result

SCRIPT = Path(__file__).with_name("torch_decode.py")
ROWS = (1, 16, 64)
LOAD = {"num_prompts": 128, "input_len": 512, "output_len": 128}
TINY_LOAD = {"num_prompts": 2, "input_len": 16, "output_len": 4}
CONTEXT, STEPS = 1024, 20
FIELDS = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
BATCHING = "transformers, continuous batching"


def own_python() -> str:
    """This machine's Python, outside of the virtual environment that this one may be of."""
    return os.environ.get("PEER_PYTHON") or str(getattr(sys, "_base_executable", sys.executable))


def asked_for(options: Options, known: dict[str, Any]) -> dict[str, Any]:
    """What `torch_decode` is to measure."""
    model = options.models[-1]
    config = resolve(model if model == "demo" else f"preset:{model}", weights=False).config
    small = options.rehearse
    return {
        "device": "cpu" if options.device == "cpu" else "cuda",
        "shape": {name: getattr(config, name) for name in FIELDS},
        "rows": [rows for rows in ((1, 2) if small else ROWS) if _name(rows) not in known],
        "context": 8 if small else CONTEXT,
        "steps": 2 if small else STEPS,
        "load": None if BATCHING in known else TINY_LOAD if small else LOAD,
    }


def run(options: Options, result: Result) -> None:
    """Fills the result."""
    if options.device == "tpu":
        result.say("Not measured: PyTorch and transformers are measured on GPUs.")
        return
    python = own_python()
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "JAX_PLATFORMS")}
    env["PYTHONSAFEPATH"] = "1"  # the script's folder has modules with names of packages that transformers looks for
    there = subprocess.run([python, "-c", "import torch"], env=env, capture_output=True, text=True, check=False)
    if there.returncode:
        reason = (there.stderr.strip().splitlines() or ["no reason given"])[-1]
        result.say(f"Not measured: {python} cannot import PyTorch ({reason}); PEER_PYTHON names another Python.")
        return
    result.figures |= result.before
    asked = asked_for(options, result.figures)
    result.unknown = [*map(_name, asked["rows"]), *[BATCHING][: asked["load"] is not None]]
    table = result.table({"": "", "figures": ""})
    for name, found in result.before.items():
        table.row(name, _shown(found))
    command = [python, str(SCRIPT), json.dumps(asked)]
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.startswith('["'):
                name, found = json.loads(line)
                result.found(name, found)
                table.row(name, _shown(found))
    if process.returncode:
        result.status = "failed"
        result.problems.append(f"{how_it_ended(process.returncode)}: see the log")


def _name(rows: int) -> str:
    return f"PyTorch, decode {rows}"


def _shown(found: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} {value:.2f}" if isinstance(value, float) else f"{name} {value}" for name, value in found.items()
    )
