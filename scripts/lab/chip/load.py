"""A server under load: tokens/s at saturation, and latencies with some streams."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from scripts.lab.chip.parts import ROOT, Options, Result
from scripts.lab.load.servers import server


class Load(NamedTuple):
    """Requests of random tokens; lengths as `lab serving` takes them."""

    num_prompts: int
    concurrency: int
    input_len: str
    output_len: str

    def __str__(self) -> str:
        return f"{self.num_prompts} requests of {self.input_len} / {self.output_len} tokens, {self.concurrency} at once"


# The means of ShareGPT's conversations as benchmarks of other engines take them: 217 and 198 tokens.
SHAREGPT = Load(1000, 256, "lognormal:105:1.3:4:1024", "lognormal:130:1.0:4:1024")
FULL = (Load(128, 32, "512", "128"), Load(256, 256, "1000", "1000"), SHAREGPT)
TINY = (Load(4, 2, "16", "4"), Load(4, 4, "16", "8"), Load(4, 4, "lognormal:8:1:4:16", "lognormal:4:1:2:8"))
METRICS = ("output_tokens_per_s", "ttft_ms", "tpot_ms", "itl_ms")


def serve_flags(options: Options) -> list[str]:
    """The flags of a server over the last of the models, for all loads."""
    model = options.models[-1]
    flags = [] if model == "demo" else ["--model", f"preset:{model}", "--load-format", "dummy"]
    limits = ["--max-num-seqs", "4", "--max-num-batched-tokens", "16", "--max-model-len", "64"]
    return [*flags, "--device", options.device, *(limits if options.rehearse else ["--max-model-len", "2304"])]


def run(options: Options, result: Result) -> None:
    """Fills the result."""
    loads = TINY if options.rehearse else FULL

    def show(name: str, served: dict[str, Any]) -> None:
        result.say(f"{options.models[-1]} over HTTP, {name}:")
        result.say("")
        for metric in METRICS:
            if metric in served:
                result.say(f"- {metric}: {json.dumps(served[metric])}")
        result.say("")
        if served["failed"]:
            result.wrong(f"{name}: {served['failed']} requests failed")

    result.unknown = [str(load) for load in loads if str(load) not in result.before]
    with server(*serve_flags(options)) as url:
        result.measure({str(load): partial(_serve, load, url) for load in loads}, show)


def _serve(load: Load, url: str) -> Any:
    """Runs the bench in a process of its own, and returns the figures that it writes, also if requests failed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures.json"
        command = [
            sys.executable, "-m", "scripts.lab", "serving", "--base-url", url, "--num-prompts", str(load.num_prompts),
            "--max-concurrency", str(load.concurrency), "--input-len", load.input_len,
            "--output-len", load.output_len, "--prompt-format", "ids", "--ignore-eos", "--output-json", str(path),
        ]  # fmt: skip
        ended = subprocess.run(command, cwd=ROOT, check=False)
        if not path.exists():
            ended.check_returncode()
        return json.loads(path.read_text())
