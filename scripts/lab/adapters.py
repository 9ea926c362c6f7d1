"""What LoRA adapters cost: tokens/s with none, one, four and eight of them, and others' pauses while some are swapped.

    python -m scripts.lab adapters
    python -m scripts.lab adapters --model ~/ckpt/mid-f32 --rounds 6 --seconds 15
    python -m scripts.lab adapters --model demo -- --max-num-batched-tokens 128

A server with `--enable-lora` and one without run at the same time. Each round loads them one after the other, with the
same requests in every row, and every other round goes backwards. A ratio is that of all rounds together, followed by
the least and the greatest of a round. The adapters have random weights and change all projections.

Seven adapters have all streams but an eighth while the last two rows are measured, and visitors arrive at `--rate`.
Without swaps they name the eighth adapter in a slot. With swaps each names another one, which is read from its files:
there are more of these than the server keeps in memory. Pauses are those of the seven adapters' streams.

Without `--model` the model has 107 M parameters of random weights: 12 layers, 768 wide, a vocabulary of 32,000.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import uvloop
from safetensors.numpy import save_file

from model.config import LlamaConfig
from model.inputs.paths import local_path
from model.loading.hf_format import ADAPTER_CONFIG, ADAPTER_FILE, expected_shapes
from model.loading.source import resolve
from scripts.flags.errors import add_debug_flag, run_command
from scripts.lab.load.client import run
from scripts.lab.load.lengths import Lengths
from scripts.lab.load.measured import Measured, measure, ratio_of_rounds, together
from scripts.lab.load.metrics import both_of, failures_of
from scripts.lab.load.mid import write_mid
from scripts.lab.load.servers import BENCH, TOKENS, Server, our_server
from scripts.lab.load.workload import BenchRequest, random_prompts
from scripts.lab.tables import Table, say_head
from server.engine.scratch_folder import ScratchFolder

OFF, ON = "without", "with"
MAX_LORAS, MAX_CPU = 8, 16
RESIDENT = tuple(f"resident-{i}" for i in range(MAX_LORAS))
COLD = tuple(f"cold-{i}" for i in range(MAX_CPU + MAX_LORAS))  # none is still in memory when its turn comes again
LENGTHS = Lengths.parse("uniform:32:96")  # of prompts and of outputs
MOST_REQUESTS = 4000  # of one row: more than it has time for
_SWAPS = "lora_slot_writes_total"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the table: to which server the requests go, which models the streams name in turns, and the visitors."""

    name: str
    server: str = ON
    models: Sequence[str]
    visitors: Sequence[str] = ()


ROWS = (
    Row(name="base, without the flag", server=OFF, models=[BENCH]),
    Row(name="base, with the flag", models=[BENCH]),
    Row(name="one adapter", models=RESIDENT[:1]),
    Row(name="four adapters", models=RESIDENT[:4]),
    Row(name="eight adapters", models=RESIDENT),
    Row(name="seven adapters, no swaps", models=RESIDENT[:-1], visitors=RESIDENT[-1:]),
    Row(name="seven adapters, swaps", models=RESIDENT[:-1], visitors=COLD),
)
RATIOS = (
    ("base: with / without the flag", "output tokens/s", "base, with the flag", "base, without the flag"),
    ("one adapter / base", "output tokens/s", "one adapter", "base, with the flag"),
    ("four adapters / base", "output tokens/s", "four adapters", "base, with the flag"),
    ("eight adapters / base", "output tokens/s", "eight adapters", "base, with the flag"),
    ("pauses: swaps / no swaps", "ITL p99", "seven adapters, swaps", "seven adapters, no swaps"),
)


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    p = argparse.ArgumentParser(prog="python -m scripts.lab adapters", description=__doc__.splitlines()[0])
    p.add_argument("--model", help="default: one of random weights, with 107 M parameters")
    p.add_argument("--device", default="cpu")
    p.add_argument("--rank", type=int, default=16, help="of the adapters (default: 16)")
    p.add_argument("--streams", type=int, default=64, help="requests at once (default: 64)")
    p.add_argument("--rate", type=float, default=4.0, help="visitors a second (default: 4)")
    p.add_argument("--rounds", type=int, default=4, help="default: 4")
    p.add_argument("--seconds", type=float, default=10.0, help="of each row in a round (default: 10)")
    p.add_argument("--start-timeout", type=float, default=600.0, metavar="S")
    p.add_argument("--port", type=int, default=8490, help="of the first server; the other has the next one")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--output-json", type=local_path)
    p.add_argument("flags", nargs="*", metavar="FLAG", help="of scripts/serve for both servers, after --")
    add_debug_flag(p)
    return p


def write_adapter(folder: Path, config: LlamaConfig, rank: int, random: np.random.Generator) -> None:
    """Writes an adapter of all projections in PEFT's form."""
    shapes, modules = expected_shapes(config), config.projections
    tensors = {}
    for module in modules:
        outputs, inputs = shapes[f"{module}.weight"]
        for part, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            values = 0.02 * random.standard_normal(shape, np.float32)
            tensors[f"base_model.model.{module}.lora_{part}.weight"] = values.astype(np.float16)
    targets = sorted({module.rpartition(".")[2] for module in modules})
    raw = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets, "bias": "none"}
    folder.mkdir(parents=True)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(raw))
    save_file(tensors, folder / ADAPTER_FILE)


@contextmanager
def servers(args: argparse.Namespace, folder: Path) -> Iterator[dict[str, Server]]:
    """Writes what they need to `folder` and starts both. Raises FailedError if one does not become ready."""
    model, own = args.model, list(args.flags)
    if model is None:
        model = str(folder / "mid")
        config = write_mid(Path(model))
        own += ["--load-format", "dummy"]
    else:
        config = resolve(model, weights=False).config
    random = np.random.default_rng(args.seed)
    for name in (*RESIDENT, *COLD):
        write_adapter(folder / "adapters" / name, config, args.rank, random)
    common = ["--model", model, "--device", args.device, "--max-model-len", "256"]
    common += ["--max-num-seqs", str(args.streams), "--no-enable-prefix-caching", "--compile-all-first", *own]
    adapted = ["--enable-lora", "--max-loras", str(MAX_LORAS), "--max-cpu-loras", str(MAX_CPU)]
    adapted += ["--max-lora-rank", str(args.rank), "--lora-folder", str(folder / "adapters")]
    with ExitStack() as stack:
        found = {}
        for port, (name, flags) in enumerate({OFF: [], ON: adapted}.items(), args.port):
            server = our_server(f"adapters-{name}", [*common, *flags], port, timeout_s=args.start_timeout)
            found[name] = stack.enter_context(server)
        yield found


def measure_row(
    row: Row, server: Server, requests: Sequence[BenchRequest], args: argparse.Namespace, number: int = 0
) -> Measured:
    """Loads the server for a while. Its streams' adapters are in slots before. Visitors go on where those of the last
    round ended."""

    def named(models: Sequence[str], requests: Sequence[BenchRequest], start: int = 0) -> list[BenchRequest]:
        return [replace(r, fields={"model": models[i % len(models)]}) for i, r in enumerate(requests, start)]

    streams = args.streams if not row.visitors else max(1, args.streams * len(row.models) // MAX_LORAS)
    asked = named(row.models, requests)
    arrivals = np.arange(1 / args.rate, args.seconds, 1 / args.rate) if row.visitors else np.empty(0)
    short, start = BenchRequest([5] * 16, 8), number * len(arrivals)
    visits = named(row.visitors, [short] * len(arrivals), start) if row.visitors else []
    resident = [*row.models, *([row.visitors[(start - 1) % len(row.visitors)]] if row.visitors else [])]
    first = named(resident, [short] * len(resident))
    num_tokens = server.counters()[TOKENS]  # of all rows before
    outcomes, _ = uvloop.run(run(server.target, first, arrivals=None, max_concurrency=MAX_LORAS))
    num_tokens += sum(outcome.output_tokens for outcome in outcomes)
    before = server.counters_with(num_tokens)[_SWAPS]
    found = measure(server, asked, max_concurrency=streams, send_until_s=args.seconds, visits=visits, arrivals=arrivals)
    num_tokens += sum(outcome.output_tokens for outcome in (*found.outcomes, *found.visits))
    num_swaps = round(server.counters_with(num_tokens)[_SWAPS] - before)
    if row.visitors:
        found.counts["num_swaps"] = num_swaps
    return found


def table(measured: dict[str, list[Measured]]) -> str:
    """The rows over all rounds, and the ratios."""
    latencies = {"TTFT p50/p99 ms": ">13", "TPOT p50 ms": "7.1f", "ITL p50/p99 ms": ">13", "foreign cores": "5.2f"}
    table = Table({"": "<34", "requests": "7", "out tok/s": "9.1f", **latencies, "swaps": "5", " ": ""})
    for name, parts in measured.items():
        result = together(parts).results()
        for title, of in ((name, result), (f"{name}: visitors", result.get("visitors"))):
            if of is not None:
                tpot = (of["tpot_ms"] or {}).get("p50")
                cells = both_of(of, "ttft"), tpot, both_of(of, "itl", 1), of.get("foreign_cores"), of.get("num_swaps")
                table.row(title, of["completed"], of["output_tokens_per_s"], *cells, failures_of(of))
    lines = [*table.lines, ""]
    for text, metric, *rows in RATIOS:
        lines.append(ratio_of_rounds(text, metric, *(measured[row] for row in rows)))
    return "\n".join(lines)


def bench(args: argparse.Namespace) -> int:
    """Runs all rows in all rounds, prints the table, and returns the exit code: 1 if a request failed."""
    if args.streams < MAX_LORAS or args.rounds < 1 or args.seconds <= 0 or args.rate <= 0 or args.rank < 1:
        least = f"--streams is at least {MAX_LORAS}, --rounds and --rank at least 1, --seconds and --rate above 0"
        raise ValueError(least)
    random = np.random.default_rng(args.seed)
    measured: dict[str, list[Measured]] = {row.name: [] for row in ROWS}
    say_head()
    with ScratchFolder() as scratch, servers(args, scratch.path) as running:
        for row in ROWS:  # adapters are loaded by their names, and programs run once
            measure_row(row, running[row.server], _requests(args.streams, random), args)
        for number in range(args.rounds):
            requests = _requests(MOST_REQUESTS, random)
            for row in ROWS if number % 2 == 0 else reversed(ROWS):
                measured[row.name].append(measure_row(row, running[row.server], requests, args, number))
    print(table(measured))
    results = {name: [part.results() for part in parts] for name, parts in measured.items()}
    if args.output_json:
        args.output_json.write_text(json.dumps(results, indent=2) + "\n")
    outcomes = [o for parts in measured.values() for part in parts for o in (*part.outcomes, *part.visits)]
    return 1 if any(outcome.error for outcome in outcomes) else 0


def _requests(count: int, random: np.random.Generator) -> list[BenchRequest]:
    prompts = random_prompts(LENGTHS.draw(count, random), as_ids=True, vocab_size=1000, shared_prefix=0, random=random)
    return [BenchRequest(p, int(n)) for p, n in zip(prompts, LENGTHS.draw(count, random), strict=True)]


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    args = parser().parse_args(argv)
    return run_command("adapters", lambda: bench(args), debug=args.debug)
