"""A server under load: tokens/s at saturation, and latencies with some streams. And the engine without HTTP."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from scripts.lab.chip.parts import ROOT, Options, Result
from scripts.lab.load.servers import server


class Load(NamedTuple):
    """Requests of random tokens."""

    num_prompts: int
    concurrency: int
    input_len: int
    output_len: int

    def __str__(self) -> str:
        return f"{self.num_prompts} requests of {self.input_len} / {self.output_len} tokens, {self.concurrency} at once"


FULL = (Load(128, 32, 512, 128), Load(256, 256, 1000, 1000))
TINY = (Load(4, 2, 16, 4), Load(4, 4, 16, 8))


def run(options: Options, result: Result) -> None:
    """Fills the result, for the first of the models. The engine without HTTP has the last load, and reads the programs
    that the server has compiled."""
    loads = TINY if options.rehearse else FULL
    model = options.models[0]
    flags = [] if model == "demo" else ["--model", f"preset:{model}", "--load-format", "dummy"]
    limits = ["--max-num-seqs", "4", "--max-num-batched-tokens", "16", "--max-model-len", "64"]
    flags += ["--device", options.device, *(limits if options.rehearse else ["--max-model-len", "2304"])]
    with tempfile.TemporaryDirectory() as cache:
        flags += ["--compile-cache", cache]
        with server(*flags) as url:
            for load in loads:
                result.say(f"{model} over HTTP, {load}:")
                result.say("")
                _serve(load, url, result)
        load = loads[-1]
        lengths = ["--input-len", str(load.input_len), "--output-len", str(load.output_len)]
        (found,) = _bench("offline", *flags, *lengths, "--num-prompts", str(load.num_prompts))["runs"]
    result.figures["offline"] = found
    result.say(f"Without HTTP, the same: {found['tokens_per_s']:.0f} output tokens/s.")
    if found["compiles_after_warm_up"]:
        result.wrong(f"without HTTP: {found['compiles_after_warm_up']} compilations while serving")


def _serve(load: Load, url: str, result: Result) -> None:
    served = _bench(
        "serving", "--base-url", url, "--num-prompts", str(load.num_prompts),
        "--max-concurrency", str(load.concurrency), "--input-len", str(load.input_len),
        "--output-len", str(load.output_len), "--prompt-format", "ids", "--ignore-eos",
    )  # fmt: skip
    result.figures[f"served {load}"] = served
    for name in ("output_tokens_per_s", "ttft_ms", "tpot_ms", "itl_ms"):
        if name in served:
            result.say(f"- {name}: {json.dumps(served[name])}")
    result.say("")
    if served["failed"]:
        result.wrong(f"{load}: {served['failed']} requests failed")


def _bench(name: str, *flags: str) -> Any:
    """Runs a bench in a process of its own, and returns the JSON that it writes, also if requests failed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures.json"
        command = [sys.executable, "-m", "scripts.lab", name, *flags, "--output-json", str(path)]
        ended = subprocess.run(command, cwd=ROOT, check=False)
        if not path.exists():
            ended.check_returncode()
        return json.loads(path.read_text())
