"""Compares ways to choose among replicas, on shared prefixes that do not fit the pages of one of them.

    python -m scripts.lab routing --simulate
    python -m scripts.lab routing
    python -m scripts.lab routing --num-requests 40 --rounds 1 --model MODEL -- --num-pages 64

Each policy has a server of two replicas: in turns; to the one with the fewest open requests; to the one that was last
sent a prefix; and as the server does it, by the cost of what is to be computed. They run at the same time and are
loaded one after the other, with the same requests and empty prefix caches in each round; every other round goes
backwards. A request begins with one of `--prefixes` prefixes, drawn evenly, and arrivals are a Poisson process. By
default one replica has pages for six tenths of the prefixes.

With `--simulate` the real schedulers are compared over devices that only cost time: the figures are the same on every
machine. Without `--model` the model has 107 M parameters of random weights: 12 layers, 768 wide, a vocabulary of
32,000.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import uvloop

from model.inputs.paths import local_path
from scripts import launch
from scripts.flags.errors import add_debug_flag, run_command
from scripts.lab.load.arrivals import arrival_times
from scripts.lab.load.client import Outcome, Target, run
from scripts.lab.load.metrics import both_of, failures_of, summary
from scripts.lab.load.mid import write_mid
from scripts.lab.load.servers import ForeignLoad, serving
from scripts.lab.load.workload import BenchRequest, random_ids
from scripts.lab.simulation.routers import ROUTERS
from scripts.lab.simulation.shared_prefixes import CASES, SEEDS, compare_routers
from scripts.lab.tables import Table, ratio, say, say_head
from server.engine.scratch_folder import ScratchFolder

SERVE = "serve"  # the first argument of a server's process; the policy and the server's flags follow
KEY = "bench"  # opens the administrators' routes
NUM_REPLICAS = 2
POOL = 0.6  # of the prefixes, that one replica has pages for
PAGE_SIZE = 16
METRICS_S = 1.2  # the age that a server's figures may have
_COUNTS = re.compile(r"^pallas_serve:prefix_cache_(queries|hits)_total\{.*\} (\S+)$", re.MULTILINE)


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    p = argparse.ArgumentParser(prog="python -m scripts.lab routing", description=__doc__.splitlines()[0])
    p.add_argument("--simulate", action="store_true", help="compare in simulated time, without servers")
    p.add_argument("--model", help="default: one of random weights, with 107 M parameters")
    p.add_argument("--device", default="cpu")
    p.add_argument("--prefixes", type=int, default=40, help="default: 40")
    p.add_argument("--prefix-len", type=int, default=256, help="tokens (default: 256)")
    p.add_argument("--tail-len", type=int, default=16, help="tokens of each prompt's own (default: 16)")
    p.add_argument("--output-len", type=int, default=8, help="tokens (default: 8)")
    p.add_argument("--num-requests", type=int, default=160, help="of each policy in a round (default: 160)")
    p.add_argument("--request-rate", type=float, default=1.0, help="requests a second (default: 1)")
    p.add_argument("--rounds", type=int, default=2, help="default: 2")
    p.add_argument("--start-timeout", type=float, default=600.0, metavar="S")
    p.add_argument("--port", type=int, default=8500, help="of the first server; the others have the next ones")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--output-json", type=local_path)
    p.add_argument("flags", nargs="*", metavar="FLAG", help="of scripts/serve for all servers, after --")
    add_debug_flag(p)
    return p


def requests_of(args: argparse.Namespace, random: np.random.Generator) -> list[BenchRequest]:
    """Those of one round."""
    prefixes = random_ids(np.full(args.prefixes, args.prefix_len), vocab_size=1000, shared_prefix=0, random=random)
    tails = random_ids(np.full(args.num_requests, args.tail_len), vocab_size=1000, shared_prefix=0, random=random)
    drawn = random.integers(0, args.prefixes, args.num_requests)
    return [BenchRequest(prefixes[i] + tail, args.output_len) for i, tail in zip(drawn, tails, strict=True)]


@dataclass(frozen=True)
class Server:
    """A running server."""

    target: Target
    process: psutil.Process

    def empty_caches(self) -> None:
        """Empties the prefix caches of all replicas."""
        request = urllib.request.Request(f"{self.target.base_url}/reset_prefix_cache", b"", _HEADERS)
        urllib.request.urlopen(request).close()

    def num_looked_up(self) -> np.ndarray:
        """i64[2], prompt tokens that were looked up in prefix caches until now, and those that were found."""
        time.sleep(METRICS_S)
        with urllib.request.urlopen(f"{self.target.base_url}/metrics") as answer:
            found = _COUNTS.findall(answer.read().decode())
        return np.array([sum(round(float(n)) for own, n in found if own == name) for name in ("queries", "hits")])


_HEADERS = {"authorization": f"Bearer {KEY}"}


@contextmanager
def servers(args: argparse.Namespace, folder: Path) -> Iterator[dict[str, Server]]:
    """Starts one for each policy. Raises FailedError if one does not become ready."""
    model, own = args.model, list(args.flags)
    if model is None:
        model = str(folder / "mid")
        write_mid(Path(model))
        own += ["--load-format", "dummy"]
    context = args.prefix_len + args.tail_len + args.output_len
    pages = round(POOL * args.prefixes * args.prefix_len / PAGE_SIZE)
    common = ["--model", model, "--device", args.device, "--served-model-name", "bench", "--compile-all-first"]
    common += ["--max-model-len", str(context), "--page-size", str(PAGE_SIZE), "--num-pages", str(pages)]
    common += ["--data-parallel-size", str(NUM_REPLICAS), "--admin-api-key", KEY, *own]
    with ExitStack() as stack:
        found = {}
        for port, policy in enumerate(ROUTERS, args.port):
            command = [sys.executable, "-m", "scripts.lab", "routing", SERVE, policy, "--port", str(port), *common]
            name = f"routing-{policy.replace(' ', '-')}"
            process = stack.enter_context(serving(name, shlex.join(command), port, timeout_s=args.start_timeout))
            found[policy] = Server(Target(base_url=f"http://127.0.0.1:{port}", model="bench", ignore_eos=True), process)
        yield found


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One policy in one round, or in all of them."""

    outcomes: list[Outcome]
    seconds: float
    foreign_cores: float
    looked_up: np.ndarray  # i64[2], as of `Server.num_looked_up`

    def results(self) -> dict[str, Any]:
        """Its figures."""
        queries, hits = self.looked_up.tolist()
        hit_rate = hits / queries if queries else 0.0
        return summary(self.outcomes, self.seconds) | {"hit_rate": hit_rate, "foreign_cores": self.foreign_cores}


def together(parts: list[Measured]) -> Measured:
    """All rounds as one."""
    seconds = sum(part.seconds for part in parts)
    return Measured(
        outcomes=[outcome for part in parts for outcome in part.outcomes],
        seconds=seconds,
        foreign_cores=sum(part.foreign_cores * part.seconds for part in parts) / seconds,
        looked_up=np.sum([part.looked_up for part in parts], axis=0),
    )


def measure(server: Server, requests: list[BenchRequest], arrivals: np.ndarray) -> Measured:
    """Sends the requests, each at its arrival."""
    server.empty_caches()
    before, foreign = server.num_looked_up(), ForeignLoad(server.process)
    outcomes, seconds = uvloop.run(run(server.target, requests, arrivals=arrivals, max_concurrency=None))
    return Measured(
        outcomes=outcomes, seconds=seconds, foreign_cores=foreign.cores(), looked_up=server.num_looked_up() - before
    )


def table(results: dict[str, dict[str, Any]]) -> str:
    """The policies, and the last one's figures to the others'."""
    columns = {"requests": "7", "hit rate": "6.3f", "TTFT p50/p99 ms": ">15", "e2e p50/p99 ms": ">15"}
    table = Table({"": "<14", **columns, "foreign cores": "5.2f", " ": ""})
    for policy, of in results.items():
        cells = of["hit_rate"], both_of(of, "ttft"), both_of(of, "e2el"), of["foreign_cores"]
        table.row(policy, of["completed"], *cells, failures_of(of))
    lines = [*table.lines, ""]
    *others, own = results
    for other in others:
        for figure in ("mean", "p99"):
            above, below = ((results[policy]["ttft_ms"] or {}).get(figure) for policy in (own, other))
            lines.append(ratio(f"{own} / {other} (TTFT {figure})", above, below))
    return "\n".join(lines)


def simulated(count: int) -> None:
    """Prints the table in simulated time, with `count` requests in each row."""
    form = {"hit rate": "6.3f", "TTFT p50/p99 ms": ">15", "TTFT mean ms": "6.1f", "busiest / idlest": "6.2f"}
    table = Table({"workload": "<40", "policy": "<14", **form}, say)
    for name, case in CASES.items():
        for policy, of in compare_routers(case, -(-count // len(SEEDS))).items():
            p50, p99 = (of.percentile(q) * 1e3 for q in (50, 99))
            shares = [max(run.num_sent) / max(1, min(run.num_sent)) for run in of.runs]
            table.row(name, policy, of.hit_rate, f"{p50:.0f} / {p99:.0f}", of.ttft.mean() * 1e3, max(shares))


def bench(args: argparse.Namespace) -> int:
    """Runs all policies in all rounds, prints the table, and returns the exit code: 1 if a request failed."""
    counts = (args.prefixes, args.prefix_len, args.tail_len, args.output_len, args.num_requests, args.rounds)
    if min(counts) < 1 or args.request_rate <= 0:
        raise ValueError("lengths and numbers of prefixes, requests and rounds are at least 1, --request-rate above 0")
    if args.simulate:
        say_head()
        simulated(args.num_requests)
        return 0
    random = np.random.default_rng(args.seed)
    measured: dict[str, list[Measured]] = {policy: [] for policy in ROUTERS}
    say_head()
    with ScratchFolder() as scratch, servers(args, scratch.path) as running:
        for policy in ROUTERS:  # all programs run once
            first = [replace(request, max_tokens=1) for request in requests_of(args, random)[: 4 * NUM_REPLICAS]]
            uvloop.run(run(running[policy].target, first, arrivals=None, max_concurrency=len(first)))
        for number in range(args.rounds):
            requests = requests_of(args, random)
            arrivals = arrival_times(len(requests), rate=args.request_rate, burstiness=1.0, random=random)
            for policy in ROUTERS if number % 2 == 0 else reversed(ROUTERS):
                measured[policy].append(measure(running[policy], requests, arrivals))
    print(table({policy: together(parts).results() for policy, parts in measured.items()}))
    if args.output_json:
        rounds = {policy: [part.results() for part in parts] for policy, parts in measured.items()}
        args.output_json.write_text(json.dumps(rounds, indent=2) + "\n")
    return 1 if any(outcome.error for parts in measured.values() for part in parts for outcome in part.outcomes) else 0


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    given = sys.argv[1:] if argv is None else argv
    if given[:1] == [SERVE]:
        return launch.main(given[2:], router=ROUTERS[given[1]]())
    args = parser().parse_args(argv)
    return run_command("routing", lambda: bench(args), debug=args.debug)
