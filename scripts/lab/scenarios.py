"""Mixed loads by name, each on servers that it starts itself: a table for each.

    python -m scripts.lab scenarios all --model ~/ckpt/mid-f32
    python -m scripts.lab scenarios prefix --context 2048 --seconds 30

`long-prompts`: one prompt of 7/8 of the context a second among 32 chats, in chunks and whole. `texts`: ten long texts,
five a second, among 32 chats; each has twelve characters for a token of the context, is encoded, and then cut to 16
tokens. `prefix`: prompts that share three quarters of their tokens, and prompts that share none, with and without the
prefix cache. `bursts`: even arrivals and bursts, at half the capacity. `priorities`: a tenth of the requests goes
before the others, above the capacity. `targets`: chats at six tenths of the capacity and a long prompt every four
seconds, by default, with static limits of a step's tokens, and with --target-ttft and --target-itl. `goodput`: the
highest rate of chats within objectives. Servers of one scenario run at the same time, and are loaded one after the
other; rounds alternate between them. They compile all programs before they are ready: a CPU would compile some while
the first rows are measured. `--peer NAME=URL` is a server that runs already and names its model "bench". In each round
it gets the requests of the first row.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import uvloop

from batcher.request import Targets
from model.inputs.paths import local_path
from model.loading.source import DEMO
from scripts.flags.errors import FailedError, add_debug_flag, run_command
from scripts.lab.load.arrivals import arrival_times
from scripts.lab.load.client import Outcome, Target, run
from scripts.lab.load.goodput import Trial, find_rate, passes
from scripts.lab.load.goodput import table as goodput_table
from scripts.lab.load.metrics import both_of, failures_of, summary
from scripts.lab.load.scenarios import SCENARIOS, Scenario, Size, Variant, chats, closed_loop
from scripts.lab.load.servers import serving
from scripts.lab.tables import Table, ratio, say_head
from server.flag import EachCounts

GOODPUT = "goodput"
SLOS = {"ttft": 500.0, "tpot": 50.0}
SHARE = 0.9  # of the requests, within the objectives
Row = dict[str, Any]
Servers = Mapping[str, Target]


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    p = argparse.ArgumentParser(prog="python -m scripts.lab scenarios", description=__doc__.splitlines()[0])
    p.add_argument("scenario", choices=(*SCENARIOS, GOODPUT, "all"))
    p.add_argument("--model", default=DEMO)
    p.add_argument("--device", default="cpu")
    p.add_argument("--context", type=int, default=1024, help="tokens; lengths are in proportion to it (default: 1024)")
    p.add_argument("--seconds", type=float, default=15.0, help="of each row (default: 15)")
    p.add_argument("--start-timeout", type=float, default=300.0, metavar="S")
    p.add_argument("--port", type=int, default=8480, help="of the first server; the others have the next ones")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--peer", type=_peer, nargs="+", action=EachCounts, default=[], metavar="NAME=URL")
    p.add_argument("--output-json", type=local_path)
    add_debug_flag(p)
    return p


def _peer(text: str) -> tuple[str, Target]:
    name, _, url = text.partition("=")
    if not name or not url.startswith("http"):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=URL, such as vllm=http://localhost:8000")
    return name, Target(base_url=url, model="bench", ignore_eos=True)


@contextmanager
def servers(flags: Mapping[str, str], args: argparse.Namespace) -> Iterator[Servers]:
    """Starts a server for each set of flags. Raises FailedError if one does not become ready."""
    with ExitStack() as stack:
        targets = {}
        for number, (name, own) in enumerate(flags.items()):
            port = args.port + number
            command = (
                f"{shlex.quote(sys.executable)} -m scripts.launch --model {shlex.quote(args.model)} --port {port} "
                f"--device {args.device} --served-model-name bench --max-model-len {args.context} "
                f"--compile-all-first {own}"
            )
            stack.enter_context(serving(name.replace(" ", "-"), command, port, timeout_s=args.start_timeout))
            targets[name] = Target(base_url=f"http://127.0.0.1:{port}", model="bench", ignore_eos=True)
        yield targets


async def measure(variant: Variant, target: Target, seconds: float) -> dict[str, tuple[list[Outcome], float]]:
    """The outcomes of each part, and the seconds that it took."""
    runs = [
        run(
            target, part.requests, arrivals=part.arrivals, max_concurrency=part.concurrency,
            send_until_s=float("inf") if part.concurrency is None else seconds,
        )
        for part in variant.parts
    ]  # fmt: skip
    return dict(zip([part.name for part in variant.parts], await asyncio.gather(*runs), strict=True))


def capacity_of(target: Target, size: Size, random: np.random.Generator) -> float:
    """Chats per second with all streams busy. Raises FailedError if a request fails."""
    part = closed_loop(size, random)
    outcomes, seconds = uvloop.run(
        run(
            target, part.requests, arrivals=None, max_concurrency=part.concurrency,
            send_until_s=max(1.0, size.seconds / 2),
        )
    )  # fmt: skip
    if errors := [outcome.error for outcome in outcomes if outcome.error]:
        raise FailedError(f"the capacity cannot be measured: {errors[0]}")
    return len(outcomes) / seconds


def rows_of(
    scenario: Scenario, size: Size, ours: Servers, peers: Servers, random: np.random.Generator
) -> dict[str, Row]:
    """The figures of each row by its name, over all rounds."""
    first, targets = next(iter(ours.values())), {**ours, **peers}
    for target in targets.values():
        uvloop.run(run(target, chats(size, 4, random), arrivals=None, max_concurrency=4))
    capacity = capacity_of(first, size, random) if scenario.needs_capacity else 0.0
    found: dict[str, list[tuple[list[Outcome], float]]] = defaultdict(list)  # of each round
    seconds = size.seconds / scenario.rounds
    for _ in range(scenario.rounds):
        variants = scenario.variants(size, capacity, random)
        for variant in [*variants, *(replace(variants[0], name=peer, server=peer) for peer in peers)]:
            for part, (outcomes, taken_s) in uvloop.run(measure(variant, targets[variant.server], seconds)).items():
                name = variant.name if len(variant.parts) == 1 else f"{variant.name}, {part}"
                found[name].append((outcomes, taken_s))
    rows = {}
    for name, rounds in found.items():
        rows[name] = summary(list(chain(*(outcomes for outcomes, _ in rounds))), sum(taken_s for _, taken_s in rounds))
        if scenario.targets is not None:
            rows[name]["within"] = [within(outcomes, scenario.targets) for outcomes, _ in rounds]
    return rows


def within(outcomes: Sequence[Outcome], targets: Targets) -> float:
    """The share of the requests within the targets, as the server counts them. Those that failed are not."""

    def is_kept(outcome: Outcome) -> bool:
        if outcome.error is not None or not outcome.chunk_times:
            return False
        gaps = np.diff(outcome.chunk_times)
        late = 0 if targets.itl_ms is None else int((gaps * 1e3 > targets.itl_ms).sum())
        return targets.are_kept(outcome.chunk_times[0] - outcome.start, len(gaps), late)

    return sum(map(is_kept, outcomes)) / len(outcomes)


def table(title: str, rows: Mapping[str, Row], scenario: Scenario) -> str:
    """The rows, and the ratios between some of them."""
    latencies = {"TTFT p50/p99 ms": ">13", "TPOT p50 ms": "7.1f", "ITL p50/p99 ms": ">13"}
    shares = {} if scenario.targets is None else {"within, each round": ""}
    table = Table({title: "<34", "requests": "7", "out tok/s": "9.1f", **latencies, **shares, "": ""})
    for name, row in rows.items():
        rate, tpot = row["output_tokens_per_s"], (row["tpot_ms"] or {}).get("p50")
        ttft, itl = both_of(row, "ttft"), both_of(row, "itl", digits=1)
        each = [", ".join(f"{share:.1%}" for share in row["within"])] if shares else []
        table.row(name, row["completed"], rate, ttft, tpot, itl, *each, failures_of(row))
    lines = [*table.lines, ""]
    for text, metric, above, below in scenario.ratios:
        figure = "p99" if metric == "itl" else "mean"
        above_ms, below_ms = ((rows[name][f"{metric}_ms"] or {}).get(figure) for name in (above, below))
        lines.append(ratio(f"{text} ({metric.upper()} {figure})", above_ms, below_ms))
    return "\n".join(lines)


def goodput(size: Size, target: Target, random: np.random.Generator) -> list[Trial]:
    """Trials at rising rates, with new chats in each: a prefix cache would know the old ones."""
    uvloop.run(run(target, chats(size, 4, random), arrivals=None, max_concurrency=4))

    def attempt(rate: float) -> Trial:
        count = max(10, int(rate * size.seconds))
        arrivals = arrival_times(count, rate=rate, burstiness=1.0, random=random)
        outcomes, seconds = uvloop.run(run(target, chats(size, count, random), arrivals=arrivals, max_concurrency=None))
        result = summary(outcomes, seconds, slos_ms=SLOS)
        return Trial(rate, result, passes(result, share=SHARE))

    return find_rate(attempt, start=1.0)


def bench(args: argparse.Namespace) -> int:
    """Runs the scenarios, prints their tables, and returns the exit code: 1 if a request failed."""
    size = Size(context=args.context, seconds=args.seconds)
    if size.context < 256 or size.seconds <= 0:
        raise ValueError(f"--context is at least 256 and --seconds above 0: {args.context}, {args.seconds:g}")
    random = np.random.default_rng(args.seed)
    results: dict[str, Any] = {}
    say_head()
    for name in (*SCENARIOS, GOODPUT) if args.scenario == "all" else (args.scenario,):
        if name == GOODPUT:
            with servers({"ours": "--no-enable-prefix-caching"}, args) as targets:
                trials = goodput(size, targets["ours"], random)
            print(goodput_table(trials, SLOS, needed=SHARE), end="\n\n", flush=True)
            results[name] = {f"{trial.rate:.3f}": trial.result for trial in trials}
        else:
            scenario = SCENARIOS[name]
            with servers(scenario.servers(size), args) as targets:
                results[name] = rows_of(scenario, size, targets, dict(args.peer), random)
            print(table(name, results[name], scenario), end="\n\n", flush=True)
    if args.output_json:
        args.output_json.write_text(json.dumps(results, indent=2) + "\n")
    return 1 if any(row["failed"] for rows in results.values() for row in rows.values()) else 0


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    args = parser().parse_args(argv)
    return run_command("scenarios", lambda: bench(args), debug=args.debug)
