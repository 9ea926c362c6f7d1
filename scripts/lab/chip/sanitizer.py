"""The GPU kernels at small shapes under NVIDIA's compute-sanitizer: a process for each tool, all at once.

Each process tests all forms, as `kernels` does, but without poison: `initcheck` finds memory that nothing has written.
Every buffer has an allocation of its own: in a pool, an access behind the end of a buffer would be one to another. A
rehearsal has no tools, and runs one process without.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from threading import Thread

from pallas_kernels.spec import Backend
from scripts.lab.chip.kernels import forms, test_form
from scripts.lab.chip.parts import ROOT, Options, Result

# With their options: jax asks the driver for what may be missing, and memcheck would call the answers errors.
TOOLS = {"memcheck": ("--report-api-errors", "no"), "racecheck": (), "synccheck": (), "initcheck": ()}
PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/opt/nvidia/compute-sanitizer")
ENVIRONMENT = {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
FLAGS = "--xla_gpu_autotune_level=0"  # timing products would take longest
MARK = "form: "  # begins a line about a form
SAID = "========= "  # begins the tools' lines
NO_FINDINGS = ("COMPUTE-SANITIZER", "ERROR SUMMARY", "RACECHECK SUMMARY", "Target application")
SHOWN = 3  # lines of a finding


def run(options: Options, result: Result) -> None:
    """Fills the result. It is wrong if a tool finds something."""
    if options.device == "tpu":
        result.say("Not checked: compute-sanitizer is NVIDIA's.")
        return
    path = shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), *PLACES]))
    if path is None and not options.rehearse:
        result.say("Not checked: compute-sanitizer is not on the PATH; it is part of NVIDIA's CUDA toolkit.")
        return
    tools = {"no tool": ()} if options.rehearse else TOOLS
    wanted = {tool: {_name(tool, *form): form for form in _forms(options)} for tool in tools}
    result.measure(
        {name: dict for names in wanted.values() for name in names if name in result.before}, lambda *_: None
    )
    result.unknown = [name for names in wanted.values() for name in names if name not in result.figures]
    table = result.table({"form": "", "largest error of a row": ".2%", "findings": ""})
    for name, found in result.figures.items():
        table.row(name, found.get("largest_error"), "none")
    said: queue.Queue[tuple[str, str | None]] = queue.Queue()
    for tool, names in wanted.items():
        left = [form for name, form in names.items() if name in result.unknown]
        prefix = [] if options.rehearse else [str(path), "--tool", tool, *tools[tool]]
        command = [*prefix, sys.executable, "-m", __name__, options.to_json(), json.dumps(left)]
        Thread(target=_run, args=(tool, command, said), daemon=True).start()
    running, findings = set(tools), {tool: list[str]() for tool in tools}
    while running:
        tool, line = said.get()
        if line is None:
            running.remove(tool)
            if findings[tool]:  # behind the last form
                result.wrong(f"{tool}: {'; '.join(findings[tool][:SHOWN])}")
            continue
        print(f"{tool}: {line}", flush=True)
        if line.startswith(MARK):
            (form, found), seen = json.loads(line.removeprefix(MARK)), findings[tool]
            findings[tool] = []
            seen += [found["problem"]] if "problem" in found else []
            name = _name(tool, *form)
            if seen:
                result.wrong(f"{name}: {'; '.join(seen[:SHOWN])}")
                found = {"findings": seen}
            result.found(name, found)
            table.row(name, found.get("not_supported", found.get("largest_error")), "SEE ABOVE" if seen else "none")
        elif line.startswith(SAID) and not any(text in line for text in NO_FINDINGS):
            findings[tool].append(line.removeprefix(SAID).strip())
    if result.unknown and not result.is_bad:
        result.status = "failed"
        result.problems.append("a tool ended before it had tested all forms: see the log")


def _name(tool: str, model: str, backend: str, kv_dtype: str) -> str:
    return f"{tool}: {model}, {backend}, K/V in {kv_dtype}"


def _forms(options: Options) -> list[tuple[str, Backend, str]]:
    """Those of the kernels that are written by hand."""
    return [form for form in forms(options) if form[1].startswith("gpu")]


def _run(tool: str, command: Sequence[str], said: queue.Queue[tuple[str, str | None]]) -> None:
    """Puts the lines of the process, and None at its end."""
    env = os.environ | ENVIRONMENT | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"}
    with subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            said.put((tool, line.rstrip()))
    said.put((tool, None))


def main(options: str, left: str) -> None:
    """Tests the forms in this process, a line for each."""
    small = replace(Options.from_json(options), rehearse=True)  # its shapes are those of a rehearsal
    for model, backend, kv_dtype in json.loads(left):
        found = test_form(model, Backend(backend), kv_dtype, small, False)
        print(MARK + json.dumps([[model, backend, kv_dtype], found]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
