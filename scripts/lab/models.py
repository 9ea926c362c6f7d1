"""What several models in one engine cost: tokens/s and first tokens, to one model alone and to an engine for each.

    python -m scripts.lab models
    python -m scripts.lab models --streams 16 --rounds 4 --seconds 10

Ten fine-tunes of one model of 107 M parameters (noise is added to its random weights) are served in four ways: all on
the device; three on the device and the others in the host's memory; three on the device and the others on disk; each by
an engine in a process of its own. The servers of a way run next to one that has one model only, and all get the same
requests in turns; every other round goes backwards. A ratio is that of all rounds together, followed by the least and
the greatest of a round.

Streams name the models evenly, or by Zipf's law: the model of rank k gets a share in proportion to 1 / k ** 1.1.
Visitors arrive at `--rate` while the streams name the first two models only. Each names the next of the last seven, so
where three may be on the device, most of them find their model elsewhere.

A step has the rows of one model. The steps of one model with a tenth of the streams are as full as those of ten models.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import uvloop
from safetensors.numpy import save_file

from model.inputs.paths import local_path
from model.loading.hf_format import expected_shapes
from model.loading.source import resolve
from scripts.flags.errors import add_debug_flag, run_command
from scripts.lab.load.client import Outcome, run
from scripts.lab.load.lengths import Lengths
from scripts.lab.load.measured import Measured, measure, ratio_of_rounds, together
from scripts.lab.load.metrics import both_of, failures_of
from scripts.lab.load.mid import write_mid
from scripts.lab.load.servers import BENCH, Server, our_server
from scripts.lab.load.workload import BenchRequest, random_prompts
from scripts.lab.tables import Table, say_head
from server.engine.scratch_folder import ScratchFolder

NUM_MODELS, NUM_ON_DEVICE, NUM_BUSY = 10, 3, 2
NAMES = (BENCH, *(f"tune-{i}" for i in range(1, NUM_MODELS)))
ZIPF = 1.1
NOISE = 0.05  # of the weights' own deviation
LENGTHS = Lengths.parse("uniform:32:96")  # of prompts and of outputs
MOST_REQUESTS = 4000  # of one row: more than it has time for
ALONE = "alone"
WAYS = RESIDENT, HOST, DISK, OWN = "resident", "host", "disk", "own"
_FLAGS = {
    ALONE: [],
    RESIDENT: ["--max-resident-models", str(NUM_MODELS)],
    HOST: ["--max-resident-models", str(NUM_ON_DEVICE)],
    DISK: ["--max-resident-models", str(NUM_ON_DEVICE), "--models-host-memory", "0"],
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the table: the server, the models of the streams with their shares, and those of visitors."""

    name: str
    server: str
    shares: Sequence[float] = (1.0,)
    visitors: Sequence[str] = ()
    parts: int = 1  # of the streams, one part is used


EVEN, BY_ZIPF = (1.0,) * NUM_MODELS, tuple(1 / k**ZIPF for k in range(1, NUM_MODELS + 1))
FEW, OTHERS = EVEN[:NUM_BUSY], NAMES[NUM_ON_DEVICE:]
ROWS = (
    Row(name="one model alone", server=ALONE),
    Row(name="one model alone, a tenth of the streams", server=ALONE, parts=NUM_MODELS),
    Row(name="one of ten", server=RESIDENT),
    Row(name="ten on the device, evenly", server=RESIDENT, shares=EVEN),
    Row(name="ten on the device, Zipf", server=RESIDENT, shares=BY_ZIPF),
    Row(name="three on the device, others in host memory, Zipf", server=HOST, shares=BY_ZIPF),
    Row(name="three on the device, others on disk, Zipf", server=DISK, shares=BY_ZIPF),
    Row(name="two busy; visitors' on the device", server=RESIDENT, shares=FEW, visitors=OTHERS),
    Row(name="two busy; visitors' in host memory", server=HOST, shares=FEW, visitors=OTHERS),
    Row(name="two busy; visitors' on disk", server=DISK, shares=FEW, visitors=OTHERS),
    Row(name="an engine for each, evenly", server=OWN, shares=EVEN),
)


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    p = argparse.ArgumentParser(prog="python -m scripts.lab models", description=__doc__.splitlines()[0])
    p.add_argument(
        "--model", type=local_path, help="a folder with the config and tokenizer (default: 107 M parameters)"
    )
    p.add_argument("--device", default="cpu")
    p.add_argument("--streams", type=int, default=64, help="requests at once (default: 64)")
    p.add_argument("--rate", type=float, default=1.0, help="visitors a second (default: 1)")
    p.add_argument("--rounds", type=int, default=3, help="default: 3")
    p.add_argument("--seconds", type=float, default=10.0, help="of each row in a round (default: 10)")
    p.add_argument("--ways", nargs="+", action="extend", choices=WAYS, help="default: all")
    p.add_argument("--start-timeout", type=float, default=600.0, metavar="S")
    p.add_argument("--port", type=int, default=8490, help="of the first server; the others have the next ones")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--output-json", type=local_path)
    p.add_argument("flags", nargs="*", metavar="FLAG", help="of scripts/serve for all servers, after --")
    add_debug_flag(p)
    return p


def write_models(folder: Path, like: Path | None, random: np.random.Generator) -> list[Path]:
    """Writes the models in bfloat16. `like` has their config and tokenizer; None: those of 107 M parameters."""
    paths: list[Path] = []
    base: dict[str, np.ndarray] = {}
    if like is None:
        like = folder / "like"
        write_mid(like)
    config = resolve(str(like), weights=False).config
    for name in NAMES:
        paths.append(folder / name)
        shutil.copytree(like, paths[-1], ignore=shutil.ignore_patterns("*.safetensors*"))
        for tensor, shape in expected_shapes(config).items():
            if tensor not in base:
                is_norm = len(shape) == 1
                base[tensor] = np.float32(is_norm) + 0.02 * (not is_norm) * random.standard_normal(shape, np.float32)
        noisy = {
            tensor: values + NOISE * values.std() * random.standard_normal(values.shape, np.float32)
            for tensor, values in base.items()
        }
        stored = {tensor: values.astype(ml_dtypes.bfloat16) for tensor, values in noisy.items()}
        save_file(stored, paths[-1] / "model.safetensors", metadata={"format": "pt"})
    return paths


@contextmanager
def servers(args: argparse.Namespace, ways: Sequence[str], paths: Sequence[Path]) -> Iterator[dict[str, list[Server]]]:
    """Starts the servers of these ways. Raises FailedError if one does not become ready."""
    common = ["--device", args.device, "--max-model-len", "256", "--max-num-seqs", str(args.streams)]
    common += ["--no-enable-prefix-caching", "--compile-all-first", *args.flags]
    others = ["--models", *(f"{name}={path}" for name, path in zip(NAMES[1:], paths[1:], strict=True))]
    found: dict[str, list[Server]] = {}
    ports = iter(range(args.port, args.port + 100))
    with ExitStack() as stack:
        for way in ways:
            served = [["--model", str(path)] for path in paths] if way == OWN else [["--model", str(paths[0])]]
            if way in _FLAGS and way != ALONE:
                served = [[*served[0], *others, *_FLAGS[way]]]
            found[way] = []
            for number, flags in enumerate(served):
                server = our_server(
                    f"models-{way}-{number}", [*common, *flags], next(ports), timeout_s=args.start_timeout
                )
                found[way].append(stack.enter_context(server))
        yield found


def measure_row(
    row: Row, running: Sequence[Server], requests: Sequence[BenchRequest], args: argparse.Namespace, number: int
) -> Measured:
    """Loads the servers for a while. Visitors go on where those of the last round ended."""
    if len(running) > 1:
        return _measure_each(running, requests, args)
    shares = np.array(row.shares) / sum(row.shares)
    drawn = np.random.default_rng(number).choice(len(shares), len(requests), p=shares)
    asked = [_of(r, NAMES[i]) for r, i in zip(requests, drawn.tolist(), strict=True)]
    arrivals = np.arange(1 / args.rate, args.seconds, 1 / args.rate) if row.visitors else np.empty(0)
    short, start = BenchRequest([5] * 16, 8), number * len(arrivals)
    visits = [_of(short, row.visitors[(start + i) % len(row.visitors)]) for i in range(len(arrivals))]
    streams = round(args.streams / row.parts)
    measured = partial(measure, running[0], max_concurrency=streams, send_until_s=args.seconds)
    return measured(asked, visits=visits, arrivals=arrivals)


def _of(request: BenchRequest, model: str) -> BenchRequest:
    return replace(request, fields={"model": model})


def _measure_each(running: Sequence[Server], requests: Sequence[BenchRequest], args: argparse.Namespace) -> Measured:
    """Spreads the streams over the servers."""
    streams = [len(part) for part in np.array_split(np.arange(args.streams), len(running))]

    async def load() -> list[tuple[list[Outcome], float]]:
        loads = [
            run(server.target, requests[i :: len(running)], arrivals=None, max_concurrency=streams[i],
                send_until_s=args.seconds)
            for i, server in enumerate(running)
        ]  # fmt: skip
        return await asyncio.gather(*loads)

    parts = uvloop.run(load())
    outcomes = [outcome for found, _ in parts for outcome in found]
    return Measured(outcomes=outcomes, visits=[], seconds=max(s for _, s in parts), foreign_cores=math.nan)


def table(measured: dict[str, list[Measured]]) -> list[str]:
    """The rows over all rounds, and the ratios to the first two."""
    latencies = {"TTFT p50/p99 ms": ">13", "ITL p50/p99 ms": ">13", "foreign cores": "5.2f"}
    table = Table({"": "<50", "requests": "7", "out tok/s": "9.1f", **latencies, " ": ""})
    for name, parts in measured.items():
        result = together(parts).results()
        for title, of in ((name, result), (f"{name}: visitors", result.get("visitors"))):
            if of is not None:
                cells = both_of(of, "ttft"), both_of(of, "itl", 1), of.get("foreign_cores")
                table.row(title, of["completed"], of["output_tokens_per_s"], *cells, failures_of(of))
    full, few, *others = measured
    rate = "output tokens/s"
    pairs = [(name, full) for name in others] + [(name, few) for name in others]
    return [*table.lines, "", *(ratio_of_rounds(f"{a} / {b}", rate, measured[a], measured[b]) for a, b in pairs)]


def bench(args: argparse.Namespace) -> int:
    """Runs all rows in all rounds, prints a table for each way, and returns the exit code: 1 if a request failed."""
    if args.streams < NUM_MODELS or args.rounds < 1 or args.seconds <= 0 or args.rate <= 0:
        raise ValueError(f"--streams is at least {NUM_MODELS}, --rounds at least 1, --seconds and --rate above 0")
    random = np.random.default_rng(args.seed)
    results, has_failed = {}, False
    say_head()
    with ScratchFolder() as scratch:
        paths = write_models(scratch.path, args.model, random)
        for way in args.ways or WAYS:
            rows = [row for row in ROWS if row.server in (ALONE, way)]
            measured: dict[str, list[Measured]] = {row.name: [] for row in rows}
            with servers(args, (ALONE, way), paths) as running:
                for row in rows:  # models are loaded, and programs run once
                    measure_row(row, running[row.server], _requests(args.streams, random), args, 0)
                for number in range(args.rounds):
                    requests = _requests(MOST_REQUESTS, random)
                    for row in rows if number % 2 == 0 else reversed(rows):
                        measured[row.name].append(measure_row(row, running[row.server], requests, args, number))
            print(*table(measured), "", sep="\n", flush=True)
            results[way] = {name: [part.results() for part in parts] for name, parts in measured.items()}
            outcomes = [o for parts in measured.values() for part in parts for o in (*part.outcomes, *part.visits)]
            has_failed |= any(outcome.error for outcome in outcomes)
    if args.output_json:
        args.output_json.write_text(json.dumps(results, indent=2) + "\n")
    return int(has_failed)


def _requests(count: int, random: np.random.Generator) -> list[BenchRequest]:
    prompts = random_prompts(LENGTHS.draw(count, random), as_ids=True, vocab_size=1000, shared_prefix=0, random=random)
    return [BenchRequest(p, int(n)) for p, n in zip(prompts, LENGTHS.draw(count, random), strict=True)]


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    args = parser().parse_args(argv)
    return run_command("models", lambda: bench(args), debug=args.debug)
