"""Starts several servers one after the other and puts the same load on each: one table, one machine, one run.

    python -m scripts.lab peers --model ~/ckpt/mid-f32 --concurrency 4:12 16:32 --dataset-path workload.jsonl \\
        --server 'ours=scripts/serve --model {model} --port {port} --max-model-len 1024 --compile-all-first' \\
        --server 'transformers,plain=transformers serve {model} --continuous-batching --port {port}'

A server is NAME[,plain]=COMMAND. `plain` is for servers that refuse extensions of OpenAI's fields: ignore_eos and
stream_options are not sent. `--concurrency C:N` sends N requests, C at a time. Complete commands are in
scripts/lab/README.md.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import uvloop

from model.inputs.paths import local_path
from scripts.flags.errors import add_debug_flag, run_command
from scripts.lab.load.client import Target, run
from scripts.lab.load.metrics import both_of, failures_of, summary
from scripts.lab.load.servers import ForeignLoad, serving
from scripts.lab.load.workload import BenchRequest, from_file
from scripts.lab.tables import Table, ratio, say, say_head
from server.flag import EachCounts


@dataclass(frozen=True)
class Peer:
    """A server to compare: its command, and whether requests must not use extensions of OpenAI's schema."""

    name: str
    command: str  # with the placeholders {model} and {port}
    plain: bool

    @classmethod
    def parse(cls, text: str) -> Peer:
        """Parses a flag's value, NAME[,plain]=COMMAND. Raises ValueError for any other form."""
        head, _, command = text.partition("=")
        name, *options = head.split(",")
        if not name or not command or set(options) - {"plain"} or "{port}" not in command:
            raise ValueError(f"--server {text!r}: it is NAME[,plain]=COMMAND with {{port}} in it")
        return cls(name, command, "plain" in options)


def parse_load(text: str) -> tuple[int, int]:
    """'16:32' -> 16 at a time, 32 in all."""
    concurrency, _, count = text.partition(":")
    return int(concurrency), int(count or 2 * int(concurrency))


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    p = argparse.ArgumentParser(
        prog="python -m scripts.lab peers", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    p.add_argument("--server", type=Peer.parse, action="append", required=True, metavar="NAME=COMMAND")
    p.add_argument("--model", required=True, help="what {model} stands for, and what requests call the model")
    p.add_argument(
        "--dataset-path", type=local_path, required=True, help="prompts and lengths, JSON lines or one JSON list"
    )
    p.add_argument(
        "--concurrency", type=parse_load, nargs="+", action=EachCounts, default=[(4, 12), (16, 32)], metavar="C:N"
    )
    p.add_argument("--repeats", type=int, default=1, help="rounds over all servers")
    p.add_argument("--port", type=int, default=8470)
    p.add_argument("--num-warmups", type=int, default=4)
    p.add_argument("--start-timeout", type=float, default=600.0, metavar="S")
    p.add_argument("--output-json", type=local_path)
    add_debug_flag(p)
    return p


def measure(
    peer: Peer, requests: list[BenchRequest], args: argparse.Namespace, server: psutil.Process
) -> Iterator[dict[str, Any]]:
    """One result for each load on the running server."""
    target = Target(
        base_url=f"http://127.0.0.1:{args.port}",
        model=args.model,
        ignore_eos=not peer.plain,
        include_usage=not peer.plain,
    )
    # Warm-up requests are not measured: a prefix cache would hold their prompts.
    uvloop.run(run(target, requests[-args.num_warmups :], arrivals=None, max_concurrency=args.num_warmups))
    for concurrency, count in args.concurrency:
        load = ForeignLoad(server)
        outcomes, seconds = uvloop.run(run(target, requests[:count], arrivals=None, max_concurrency=concurrency))
        result = summary(outcomes, seconds)
        wanted = sum(request.max_tokens for request in requests[:count])
        yield {
            "server": peer.name,
            "concurrency": concurrency,
            "requests": count,
            "foreign_cores": load.cores(),
            "output_tokens_wanted": wanted,
            **result,
        }


def table(results: list[dict[str, Any]], names: list[str]) -> str:
    """The best round of each server, and the ratio of the first server's tokens/s to each other server's."""
    best: dict[tuple[str, int], dict[str, Any]] = {}
    for result in results:
        key = result["server"], result["concurrency"]
        if key not in best or result["output_tokens_per_s"] > best[key]["output_tokens_per_s"]:
            best[key] = result
    latencies = {"TTFT p50/p99 ms": ">13", "TPOT p50 ms": "7.1f"}
    table = Table({"server": "<16", "at once": "7", "out tok/s": "9.1f", **latencies, "foreign cores": "5.2f", "": ""})
    for (name, concurrency), result in best.items():
        ttft, tpot, notes = both_of(result, "ttft"), (result["tpot_ms"] or {}).get("p50"), failures_of(result)
        if result["output_tokens"] != result["output_tokens_wanted"]:
            notes = f"outputs of other lengths {notes}".rstrip()
        rate, foreign = result["output_tokens_per_s"], result["foreign_cores"]
        table.row(name, concurrency, rate, ttft, tpot, foreign, notes)
    first, *others = names
    lines = []
    for other in others:
        for concurrency in sorted({concurrency for _, concurrency in best}):
            ours, theirs = (best[name, concurrency]["output_tokens_per_s"] for name in (first, other))
            lines.append(ratio(f"{first} / {other} at {concurrency}", ours, theirs))
    return "\n".join([*table.lines, "", *lines])


def bench(args: argparse.Namespace) -> int:
    """Serves and loads one server after the other, prints the table, and returns the exit code."""
    requests = from_file(args.dataset_path, None)
    needed = max(count for _, count in args.concurrency) + args.num_warmups
    if len(requests) < needed:
        raise ValueError(f"{args.dataset_path} has {len(requests)} requests, {needed} are needed")
    results: list[dict[str, Any]] = []
    for _ in range(args.repeats):
        for peer in args.server:
            command = peer.command.format(model=shlex.quote(args.model), port=args.port)
            with serving(peer.name, command, args.port, timeout_s=args.start_timeout) as server:
                for result in measure(peer, requests, args, server):
                    results.append(result)
                    say(f"{peer.name} at {result['concurrency']}: {result['output_tokens_per_s']:.1f} tok/s")
    say_head()
    print(table(results, [peer.name for peer in args.server]))
    if args.output_json:
        args.output_json.write_text(json.dumps(results, indent=2) + "\n")
    return 1 if any(result["failed"] for result in results) else 0


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    args = parser().parse_args(argv)
    return run_command("peers", lambda: bench(args), debug=args.debug)
