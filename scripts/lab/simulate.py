"""Compares admission policies in simulated time: the real scheduler over a device that only costs time.

    python -m scripts.lab simulate --chips h100 h200 v6e [--loads code agents] [--trace FILE] [--code-trace FILE]
    python -m scripts.lab simulate --models 7 --targets h100 h200 v6e:2x4 [--trace FILE] [-- FLAGS]
    python -m scripts.lab simulate [--trace FILE] [--num-requests 600] [--pools 16384 65536] [--contexts 8192 131072]

All requests of a workload arrive at once. A step takes 8 ms, and 0.02 ms more per padded token. Three policies are
compared: the scheduler's own forecast; admission as soon as the pages of the known tokens are free, with a preemption
as soon as a page is missing; and a clairvoyant policy that knows every output's length and never runs out of pages.

With --chips, an 8B on these chips serves loads that arrive over time. For each policy the table has the highest rate at
which it keeps --target-ttft and --target-itl: the default, the best static pair of --max-num-seqs and
--max-num-batched-tokens for the load, vLLM's fixed budgets, P-PAS (vLLM's RFC 52906), a budget that follows the
measured pauses, and the engine with its targets. Steps take the planner's times.

With --models, that many 8B models of one shape are served on the chips of a target: by one engine, whose models take
turns; by as many processes, of which one is awake; and by as many engines with a chip each. The requests of the trace,
whose arrivals are stretched or shortened, name the models evenly or by Zipf's law. The highest rate counts at which
enough of them keep both limits of latency. Times of steps are the planner's. Weights come from the host's memory at the
published bandwidth of the link.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path

import numpy as np

from batcher.request import Targets
from pallas_kernels.chips import GPUS, TPUS
from scripts.flags.errors import add_debug_flag, run_command
from scripts.lab.load.arrivals import arrival_times, at_rate
from scripts.lab.load.lengths import Trace
from scripts.lab.load.presets import TRAFFIC
from scripts.lab.planning import fleets
from scripts.lab.planning.target import parse_target
from scripts.lab.planning.workload import arriving, parse_workload
from scripts.lab.simulation.goodput import ROWS, TOKENS, Bench, compare_on
from scripts.lab.simulation.loads import CONTEXT, Draw, loads
from scripts.lab.simulation.machine import Machine, Result, SimulatedRequest, simulate
from scripts.lab.simulation.policies import AdmitIfFree, Clairvoyant
from scripts.lab.tables import Table, say, say_head
from server.flag import EachCounts

PAGE_SIZE = 64  # tokens
CHIPS = (*TPUS, *GPUS)
MODELS_CONTEXT = 8192  # tokens, of several models
LEAST_REQUESTS = 100  # of a rate, however low it is
POLICIES = ("forecast", "admit if free", "clairvoyant")
LIMITS = ("none", "2048", "exact", "mixed")
# (prompt, output): "conversation" has the distribution of Azure's trace; "code" has longer prompts and short outputs.
_SYNTHETIC = {"conversation": TRAFFIC["chat"], "code": TRAFFIC["code"]}
Row = dict[str, Result]


def lengths(kind: str, count: int, trace: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """i64[count], i64[count]: tokens of prompts and outputs. `trace` replaces the synthetic conversation."""
    if kind == "conversation" and trace is not None:
        window = Trace.read(trace).window(0, count)
        return window.input_lens, window.output_lens
    random = np.random.default_rng(0)
    traffic = _SYNTHETIC[kind]
    return traffic.prompts.draw(count, random), traffic.outputs.draw(count, random)


def backlog(prompts: np.ndarray, outputs: np.ndarray, *, limit: str, max_model_len: int) -> list[SimulatedRequest]:
    """Requests that all arrive at once.

    Args:
        limit: the `max_tokens` of the requests: "none", a number, "exact" (the output's own length), or "mixed" (16 for
            every second request, none for the others).
    """
    requests = []
    for i, (prompt, output) in enumerate(zip(prompts.tolist(), outputs.tolist(), strict=True)):
        num_prompt = min(prompt, max_model_len - 2)
        num_output = min(output, max_model_len - num_prompt)
        match limit:
            case "none":
                max_tokens = None
            case "exact":
                max_tokens = num_output
            case "mixed":
                max_tokens = 16 if i % 2 else None
            case _:
                max_tokens = int(limit)
        requests.append(
            SimulatedRequest(arrival_s=0.0, num_prompt=num_prompt, num_output=num_output, max_tokens=max_tokens)
        )
    return requests


def short_then_long(outputs: np.ndarray) -> np.ndarray:
    """A change of regime: a tenth of each length in the first half, four times it in the second."""
    half = len(outputs) // 2
    return np.concatenate([np.maximum(outputs[:half] // 10, 1), outputs[half:] * 4])


def chats_after_short_answers() -> list[SimulatedRequest]:
    """Twenty requests that are cut off at 16 tokens, then 64 chats of 1,000 + 300 tokens without a limit."""
    short = SimulatedRequest(arrival_s=0.0, num_prompt=100, num_output=1000, max_tokens=16)
    chat = SimulatedRequest(arrival_s=10.0, num_prompt=1000, num_output=300)
    return [short] * 20 + [chat] * 64


def compare(requests: list[SimulatedRequest], machine: Machine) -> Row:
    """Policy -> result."""
    output_lens = {str(i): request.num_output for i, request in enumerate(requests)}
    runs = (
        simulate(requests, machine),
        simulate(requests, machine, forecast=AdmitIfFree(), max_stalls=0),
        simulate(requests, machine, forecast=Clairvoyant(output_lens)),
    )
    return dict(zip(POLICIES, runs, strict=True))


def cases(args: argparse.Namespace) -> Iterator[tuple[str, list[SimulatedRequest], Machine]]:
    """(description, requests, machine) of each case."""
    for context in args.contexts:
        machines = [
            Machine(max_model_len=context, num_pages=pool // PAGE_SIZE, page_size=PAGE_SIZE)
            for pool in args.pools
            if pool >= context
        ]
        for machine in machines:
            place = f"context {context:,}, pool {machine.num_pages * PAGE_SIZE:,}"
            for kind in ("conversation", "code"):
                prompts, outputs = lengths(kind, args.num_requests, args.trace)
                for limit in args.limits:
                    requests = backlog(prompts, outputs, limit=limit, max_model_len=context)
                    yield f"{kind}, limits {limit}, {place}", requests, machine
            prompts, outputs = lengths("conversation", args.num_requests, args.trace)
            changed = backlog(prompts, short_then_long(outputs), limit="none", max_model_len=context)
            yield f"short then long, {place}", changed, machine
    chats = Machine(max_model_len=131072, num_pages=524288 // PAGE_SIZE, page_size=PAGE_SIZE)
    yield "64 chats after 20 short answers, context 131,072, pool 524,288", chats_after_short_answers(), chats


def compare_goodput(args: argparse.Namespace) -> None:
    """Prints a table for each chip and load."""
    targets = Targets(ttft_ms=args.target_ttft, itl_ms=args.target_itl, percentile=args.target_percentile / 100)
    files = {"conversation": args.trace, "code": args.code_trace}
    known = loads({kind: Trace.read(path) for kind, path in files.items() if path is not None})
    draws = known | {kind: workload(kind) for kind in TRAFFIC if kind not in known}
    for chip, name in product(args.chips, args.loads or known):
        if name not in draws:
            raise ValueError(f"--loads {name}: there are {', '.join(draws)}")
        bench = Bench(draw=draws[name], count=args.num_requests, machine=machines(chip), targets=targets)
        say(f"\n{name} on {chip}\n")
        columns = {"policy": "<38", "rows": ",", "tokens": ",", "requests/s": "6.2f", "within": "6.1%"}
        table = Table(columns | {"TTFT p99 ms": ",.0f", "ITL p99 ms": ".1f"}, say)
        for held in compare_on(bench, args.seqs, args.tokens, args.policies):
            ttft, itl = (float(np.percentile(times, 99)) * 1e3 for times in (held.same.ttft, held.same.itl))
            limits, share = (held.policy.rows, held.policy.tokens), held.same.num_within / args.num_requests
            table.row(held.name, *limits, held.rate, share, ttft, itl)


def machines(chip: str) -> Callable[[int, int], Machine]:
    """The planner's machine of an 8B on a chip, by the rows and the tokens of a step."""

    @cache
    def machine(rows: int, tokens: int) -> Machine:
        limits = ["--max-num-seqs", str(rows), "--max-num-batched-tokens", str(tokens)]
        return fleets.planned(parse_target(chip), ["--max-model-len", str(CONTEXT), *limits], 1, 1, None).machine

    return machine


def workload(kind: str) -> Draw:
    """A kind of traffic as the planner draws it."""
    return lambda count, rate: arriving(parse_workload(kind).draw(count, CONTEXT), rate)


def compare_fleets(args: argparse.Namespace) -> None:
    """Prints a table of the highest rates within the targets, of each target and way."""
    trace = None if args.trace is None else Trace.read(args.trace)

    def arriving(rate: float) -> list[SimulatedRequest]:
        count = max(LEAST_REQUESTS, round(rate * args.seconds))
        prompts, outputs = lengths("conversation", count, args.trace)
        times = arrival_times(count, rate=1.0, burstiness=1.0, random=np.random.default_rng(1))
        sent = backlog(prompts, outputs, limit="none", max_model_len=MODELS_CONTEXT)
        at = at_rate(times if trace is None else trace.window(0, count).arrival_s, rate).tolist()
        return [replace(request, arrival_s=arrival_s) for request, arrival_s in zip(sent, at, strict=True)]

    table = Table(fleets.COLUMNS, say)
    for name in args.targets:
        target = parse_target(name)
        plan = partial(fleets.planned, target, ["--max-model-len", str(MODELS_CONTEXT), *args.flags], args.models)
        every = fleets.ways(plan, args.models, target.num_devices or 1, args.resident)
        found = [way for way in every if way.kind in args.ways]
        limits = fleets.Targets(ttft_s=args.ttft, tpot_s=args.tpot, share=args.share)
        fleets.compare_ways(table, name, found, arriving, args.models, limits, args.splits)


def compare_policies(args: argparse.Namespace) -> None:
    """Prints a table of steps, preemptions, recomputed tokens and worst inter-token latency of each policy."""
    say("Costs are preemptions / recomputed tokens / worst ITL in seconds.\n")
    columns = {f"{figure}: {policy}": form for figure, form in (("steps", ","), ("costs", ">")) for policy in POLICIES}
    table = Table({"workload": "", **columns}, say)
    for name, requests, machine in cases(args):
        row = compare(requests, machine)
        steps = [result.num_steps for result in row.values()]
        costs = [f"{r.num_preemptions} / {r.recomputed_tokens:,} / {r.worst_itl:.2f}" for r in row.values()]
        table.row(name, *steps, *costs)


def bench(args: argparse.Namespace) -> int:
    """Prints the table that is asked for, and returns the exit code."""
    say_head()
    if args.models:
        compare_fleets(args)
    elif args.chips:
        compare_goodput(args)
    else:
        compare_policies(args)
    return 0


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    p = argparse.ArgumentParser(prog="python -m scripts.lab simulate", description=__doc__.splitlines()[0])
    p.add_argument("--trace", type=Path, metavar="FILE", help="Azure's conversation trace, for the synthetic one")
    p.add_argument("--num-requests", type=int, default=600, metavar="N")
    p.add_argument("--contexts", type=int, nargs="+", action=EachCounts, default=[8192, 131072], metavar="TOKENS")
    p.add_argument(
        "--pools", type=int, nargs="+", action=EachCounts, default=[16384, 65536, 131072, 524288], metavar="TOKENS"
    )
    p.add_argument("--limits", nargs="+", action=EachCounts, choices=LIMITS, default=LIMITS)
    p.add_argument("--chips", nargs="+", action=EachCounts, choices=CHIPS, help="compare rates within targets on them")
    p.add_argument("--loads", nargs="+", action=EachCounts, metavar="LOAD", help="(default: all that arrive over time)")
    p.add_argument("--policies", nargs="+", action=EachCounts, metavar="NAME", help="(default: all)")
    p.add_argument("--seqs", type=int, nargs="+", action=EachCounts, default=ROWS, help="of the static pairs")
    p.add_argument("--tokens", type=int, nargs="+", action=EachCounts, default=TOKENS, help="of the static pairs")
    p.add_argument("--code-trace", type=Path, metavar="FILE", help="Azure's code trace, for the synthetic one")
    p.add_argument("--target-ttft", type=float, default=500.0, metavar="MS")
    p.add_argument("--target-itl", type=float, default=50.0, metavar="MS")
    p.add_argument("--target-percentile", type=float, default=99.0, metavar="P")
    p.add_argument("--models", type=int, metavar="N", help="compare ways to serve so many models")
    p.add_argument("--targets", nargs="+", action=EachCounts, default=["h100"], metavar="TARGET", help="default: h100")
    p.add_argument(
        "--resident", type=int, nargs="+", action=EachCounts, default=[0], metavar="N",
        help="models on the device of one engine (default: 0, as many as an engine chooses)",
    )  # fmt: skip
    kinds, splits = fleets.WAYS, [*fleets.SPLITS]
    p.add_argument("--ways", nargs="+", action=EachCounts, choices=kinds, default=kinds, help="default: all")
    p.add_argument("--splits", nargs="+", action=EachCounts, choices=splits, default=splits, help="default: all")
    p.add_argument("--seconds", type=float, default=120.0, metavar="S", help="of arrivals at a rate (default: 120)")
    p.add_argument("--ttft", type=float, default=2.0, metavar="S", help="a request's limit (default: 2)")
    p.add_argument("--tpot", type=float, default=0.1, metavar="S", help="a request's limit (default: 0.1)")
    p.add_argument("--share", type=float, default=0.9, help="of the requests that keep both limits (default: 0.9)")
    p.add_argument("flags", nargs="*", metavar="FLAG", help="of engines with several models, after --")
    add_debug_flag(p)
    args = p.parse_args(argv)
    return run_command("simulate", lambda: bench(args), debug=args.debug)
