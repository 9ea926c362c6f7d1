"""Throughput at saturation without HTTP, and a short run of a server under load."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from scripts.lab.chip.parts import ROOT, Options, Result
from scripts.lab.load.servers import server

FULL = {"num_prompts": 256, "lengths": [(1000, 1000), (128, 2048)], "serving": (128, 32, 512, 128)}
TINY = {"num_prompts": 4, "lengths": [(16, 8)], "serving": (4, 2, 16, 4)}


def run(options: Options, result: Result) -> None:
    """Fills the result, for the first of the models."""
    sizes: dict[str, Any] = TINY if options.rehearse else FULL
    model = options.models[0]
    named = [] if model == "demo" else ["--model", f"preset:{model}", "--load-format", "dummy"]
    flags = [*named, "--device", options.device]
    limits = ["--max-num-seqs", "2", "--max-num-batched-tokens", "16", "--max-model-len", "64"]
    flags += limits if options.rehearse else ["--max-model-len", "2304"]
    result.say(f"{model}, {'tiny' if options.rehearse else sizes['num_prompts']} requests at once, without HTTP:")
    result.say("")
    for input_len, output_len in sizes["lengths"]:
        lengths = ["--input-len", str(input_len), "--output-len", str(output_len)]
        prompts = ["--num-prompts", str(sizes["num_prompts"])]
        figures = _command("offline", *flags, *lengths, *prompts)
        (found,) = figures["runs"]
        result.figures[f"offline {input_len}/{output_len}"] = found
        result.say(f"- {input_len} / {output_len} tokens: {found['tokens_per_s']:.0f} output tokens/s")
        if found["compiles_after_warm_up"]:
            result.wrong(
                f"offline {input_len}/{output_len}: {found['compiles_after_warm_up']} compilations while serving"
            )
    num_prompts, concurrency, input_len, output_len = sizes["serving"]
    with server(*flags) as url:
        served = _command(
            "serving", "--base-url", url, "--num-prompts", str(num_prompts),
            "--max-concurrency", str(concurrency), "--input-len", str(input_len), "--output-len", str(output_len),
            "--prompt-format", "ids", "--ignore-eos",
        )  # fmt: skip
    result.figures["serving"] = served
    result.say("")
    result.say(f"Served over HTTP, {concurrency} streams, {input_len} / {output_len} tokens:")
    result.say("")
    for name in ("output_tokens_per_s", "ttft_ms", "tpot_ms", "itl_ms"):
        if name in served:
            result.say(f"- {name}: {json.dumps(served[name])}")
    if served["failed"]:
        result.wrong(f"{served['failed']} served requests failed")


def _command(name: str, *flags: str) -> Any:
    """Runs a bench in a process of its own, and returns the JSON that it writes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures.json"
        command = [sys.executable, "-m", "scripts.lab", name, *flags, "--output-json", str(path)]
        subprocess.run(command, cwd=ROOT, check=True)
        return json.loads(path.read_text())
