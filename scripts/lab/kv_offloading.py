"""What K/V tiers gain and cost: conversations that do not fit on the device, others' pauses meanwhile, and restarts.

    python -m scripts.lab kv_offloading
    python -m scripts.lab kv_offloading --lengths uniform:1000:6000 --rounds 1
    python -m scripts.lab kv_offloading --tiers off host llama-server --llama-server ~/bin/llama-server \\
        --llama-model ~/ckpt/mid-f32.gguf

A server without tiers, one with host memory for all conversations, and one with host memory for a quarter of them and
files behind it run at the same time. Each round loads them one after the other, with the same requests, and every other
round goes backwards. A ratio is that of all rounds together, followed by the least and the greatest of a round.

Four rows a round:
1. `away`: every conversation takes a turn. The pool holds `--pool` of `--conversations`, and those that were used last
   come last, so without tiers a history is computed each time. Each has had a turn before the first round; without
   tiers only those that the pool can hold.
2. `others, away`: streams with short prompts, while visitors arrive at `--rate`. A visitor is the next turn of a
   conversation that the device has lost.
3. `others, in the pool`: the same, with the next turns of the same conversations, which the device has now. What is
   computed is that of the row before, so the difference of a server with tiers is what its moves cost.
4. `fits`: half as many conversations as the pool holds, some times each, after a turn that is not measured.

Then a server with files is restarted after each of `--rounds` times four new prefixes of `--prefix-len` tokens.

Without `--model` the model has 107 M parameters of random weights, a context of 8,192 tokens and K/V in float32: 24 KiB
a token. Histories of 1,000 to 6,000 tokens would take seven minutes of computing for every turn of 200 conversations on
two cores (1,700 tokens/s). So by default they have a fifth of these lengths and the pool a fifth of the pages: the
share that fits and the waits for others are as they were, and a prompt's attention is less. It takes about a quarter of
an hour, without the compilation.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from model.inputs.paths import local_path
from model.loading.source import resolve
from scripts.flags.errors import add_debug_flag, run_command
from scripts.lab.load.conversations import VOCAB_SIZE, Conversations
from scripts.lab.load.lengths import Lengths
from scripts.lab.load.measured import Measured, measure, ratio_of_rounds, together
from scripts.lab.load.metrics import both_of, failures_of
from scripts.lab.load.mid import write_mid
from scripts.lab.load.page_counts import AWAY_HITS, HITS, LOST, QUERIES, counted, settled
from scripts.lab.load.restarts import COMPUTED, FIRST, IN_POOL, LATER, NUM_PREFIXES, restarts
from scripts.lab.load.servers import Server
from scripts.lab.load.tiers import Tier, TieredServers
from scripts.lab.load.workload import BenchRequest, random_ids
from scripts.lab.tables import Table, say, say_head
from server.engine.scratch_folder import ScratchFolder
from server.flag import EachCounts

VALUE_BYTES = 4  # of K/V at most, on a CPU
OTHERS_PROMPT, OTHERS_OUTPUT = 32, 200  # tokens: the streams are seldom admitted, so their pauses are not each other's
MOST_TURNS = 3  # that a conversation takes in a round: that of all, and two as a visitor
MOST_OTHERS = 500  # requests of a stream: more than it has time for
NUM_REPEATS = 4  # of the conversations that fit
AWAY, OTHERS_AWAY, OTHERS_IN_POOL, FITS = "away", "others, away", "others, in the pool", "fits"
RATIOS = (
    ("TTFT p50", (AWAY, Tier.OFF), (AWAY, Tier.HOST), ">= 3"),
    ("TTFT p50", (AWAY, Tier.OFF), (AWAY, Tier.DISK), ""),
    ("output tokens/s", (AWAY, Tier.HOST), (AWAY, Tier.OFF), ""),
    ("ITL p99", (OTHERS_AWAY, Tier.HOST), (OTHERS_IN_POOL, Tier.OFF), "<= 1.10"),
    ("ITL p99", (OTHERS_AWAY, Tier.DISK), (OTHERS_IN_POOL, Tier.OFF), "<= 1.10"),
    ("ITL p99", (OTHERS_AWAY, Tier.HOST), (OTHERS_AWAY, Tier.OFF), "<= 1.10"),
    ("output tokens/s", (FITS, Tier.HOST), (FITS, Tier.OFF), ">= 0.99"),
    ("output tokens/s", (FITS, Tier.DISK), (FITS, Tier.OFF), ">= 0.99"),
    ("TTFT p50", (FIRST, Tier.DISK), (IN_POOL, Tier.DISK), "<= 1.5"),
    ("TTFT p50", (LATER, Tier.DISK), (IN_POOL, Tier.DISK), ""),
    ("TTFT p50", (FIRST, Tier.DISK), (COMPUTED, Tier.DISK), ""),
    ("TTFT p50", (AWAY, Tier.LLAMA), (AWAY, Tier.HOST), ""),
    ("output tokens/s", (AWAY, Tier.HOST), (AWAY, Tier.LLAMA), ""),
    ("TTFT p50", (FIRST, Tier.LLAMA), (FIRST, Tier.DISK), ""),
)
Rows = dict[tuple[str, Tier], list[Measured]]


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    p = argparse.ArgumentParser(prog="python -m scripts.lab kv_offloading", description=__doc__.splitlines()[0])
    p.add_argument("--model", help="default: one of random weights, with 107 M parameters")
    p.add_argument("--device", default="cpu")
    p.add_argument("--tiers", type=Tier, choices=list(Tier), nargs="+", action=EachCounts, default=list(Tier),
                   metavar="TIER", help=f"of {', '.join(Tier)} (default: all)")  # fmt: skip
    p.add_argument("--conversations", type=int, default=200, help="default: 200")
    p.add_argument("--pool", type=int, default=40, help="conversations that the device's pages hold (default: 40)")
    p.add_argument("--lengths", type=Lengths.parse, default=Lengths.parse("uniform:200:1200"), metavar="LENGTHS",
                   help="of the histories, in tokens (default: uniform:200:1200)")  # fmt: skip
    p.add_argument("--context", type=int, default=8192, help="tokens of prompt and output (default: 8192)")
    p.add_argument("--page-size", type=int, default=64, help="tokens (default: 64)")
    p.add_argument("--num-pages", type=int, help="of the device (default: by --pool)")
    p.add_argument("--streams", type=int, default=8, help="requests at once (default: 8)")
    p.add_argument("--rate", type=float, default=1.5, help="visitors a second (default: 1.5)")
    p.add_argument("--seconds", type=float, default=12.0, help="of the streams with visitors (default: 12)")
    p.add_argument("--prefix-len", type=int, default=1500, help="tokens, of the restarts (default: 1500)")
    p.add_argument("--rounds", type=int, default=2, help="default: 2")
    p.add_argument("--llama-server", type=local_path, metavar="FILE", help="the program; without it, its rows are left "
                   "out")  # fmt: skip
    p.add_argument("--llama-model", type=local_path, metavar="FILE", help="a GGUF file of the same shapes")
    p.add_argument("--start-timeout", type=float, default=600.0, metavar="S")
    p.add_argument("--port", type=int, default=8500, help="of the first server; the others have the next ones")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--output-json", type=local_path)
    p.add_argument("flags", nargs="*", metavar="FLAG", help="of scripts/serve for all our servers, after --")
    add_debug_flag(p)
    return p


def check(args: argparse.Namespace, chats: Conversations) -> None:
    """Raises ValueError for flags with which a row would not measure what it says."""
    if args.rounds < 1 or args.streams < 1 or args.seconds <= 0 or args.rate <= 0 or args.pool < 2:
        raise ValueError("--rounds and --streams are at least 1, --pool at least 2, --seconds and --rate above 0")
    if args.conversations < 4 * args.pool:
        raise ValueError(f"--conversations is at least 4 times --pool {args.pool}: the device must have lost each one")
    if not 1 <= int(args.rate * args.seconds) <= args.pool // 2:
        raise ValueError(f"--rate times --seconds is from 1 to half of --pool {args.pool}: visitors come twice")
    if (longest := max(chats.longest(), args.prefix_len + args.page_size)) > args.context:
        raise ValueError(f"--context {args.context} is shorter than the longest conversation or prefix: {longest}")
    if args.llama_server is not None and args.llama_model is None:
        raise ValueError("--llama-server needs --llama-model")


def servers_of(args: argparse.Namespace, chats: Conversations, folder: Path) -> TieredServers:
    """Writes what they need to `folder`."""
    flags = ["--device", args.device, "--max-model-len", str(args.context), "--max-num-seqs", str(2 * args.streams)]
    if args.model is None:
        config = write_mid(folder / "mid", context=args.context)
        # A restarted server finds the pages of the same weights only.
        flags += ["--model", str(folder / "mid"), "--load-format", "dummy", "--seed", str(args.seed)]
    else:
        config = resolve(args.model, weights=False).config
        flags += ["--model", args.model]
    num_pages = chats.num_pages(args.page_size)
    most_pages = max(num_pages, NUM_PREFIXES * args.rounds * (args.prefix_len // args.page_size + 1))
    token_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * VALUE_BYTES
    return TieredServers(
        flags=[*flags, "--compile-all-first", *args.flags],
        num_pages=args.num_pages or num_pages * args.pool // args.conversations,
        page_size=args.page_size,
        stored_bytes=most_pages * args.page_size * token_bytes,
        context=args.context,
        streams=args.streams,
        folder=folder,
        llama_server=args.llama_server,
        llama_model=args.llama_model,
        start_timeout_s=args.start_timeout,
    )


def rounds(running: dict[Tier, Server], chats: Conversations, args: argparse.Namespace) -> Rows:
    """All rows that the servers run at the same time."""
    random, everyone = np.random.default_rng(args.seed + 1), range(args.conversations)
    fitting, num_visits = everyone[: args.pool // 2], int(args.rate * args.seconds)
    in_turn = [*everyone[len(fitting) :], *fitting]  # those that come last in a round come last in the next one, too
    middle = (len(everyone) + len(fitting) - num_visits) // 2
    visitors = everyone[middle : middle + num_visits]  # lost before the others are all through, and back before them
    arrivals = np.arange(1, num_visits + 1) / args.rate
    found: Rows = {}

    def load(server: Server, requests: Sequence[BenchRequest]) -> Measured:
        return measure(server, requests, max_concurrency=args.streams)

    def load_with_visitors(server: Server, others: Sequence[BenchRequest], visits: Sequence[BenchRequest]) -> Measured:
        streams = {"max_concurrency": args.streams, "send_until_s": args.seconds}
        return measure(server, others, **streams, visits=visits, arrivals=arrivals)

    first = chats.next_turn(in_turn)
    for tier, server in running.items():
        say(f"{tier}: first turns")
        load(server, first[-args.pool :] if tier is Tier.OFF else first)
        settled(server)
    for number in range(args.rounds):
        order = list(running.items())[:: 1 if number % 2 == 0 else -1]
        add(found, AWAY, order, partial(load, requests=chats.next_turn(in_turn)))
        for row in (OTHERS_AWAY, OTHERS_IN_POOL):
            others, visits = _others(args, random), chats.next_turn(visitors)
            add(found, row, order, partial(load_with_visitors, others=others, visits=visits))
        turn = chats.next_turn(fitting)
        for _, server in order:
            load(server, turn)
            settled(server)
        add(found, FITS, order, partial(load, requests=turn * NUM_REPEATS))
    return found


def add(found: Rows, row: str, order: Sequence[tuple[Tier, Server]], load: Callable[[Server], Measured]) -> None:
    """Measures the row on one server after the other. All are idle."""
    for tier, server in order:
        result = counted(server, load)
        found.setdefault((row, tier), []).append(result)
        say(f"{row}, {tier}: {len(result.outcomes)} requests in {result.seconds:.1f} s")


def _others(args: argparse.Namespace, random: np.random.Generator) -> list[BenchRequest]:
    """The requests of the streams, which ask the same again and again: their own pages do not fill the pool."""
    lengths = np.full(args.streams, OTHERS_PROMPT)
    prompts = random_ids(lengths, vocab_size=VOCAB_SIZE, shared_prefix=0, random=random)
    return [BenchRequest(prompt, OTHERS_OUTPUT) for prompt in prompts] * MOST_OTHERS


def table(measured: Rows) -> str:
    """The rows over all rounds, and the ratios of those that were measured."""
    latencies = {"TTFT p50/p99 ms": ">13", "ITL p50/p99 ms": ">13", "in the pool %": "5.1f", "away %": "5.1f"}
    table = Table({"": "<33", "requests": "7", "out tok/s": "9.1f", **latencies, "foreign cores": "5.2f", " ": ""})
    for (row, tier), parts in measured.items():
        result = together(parts).results()
        shares = [100 * result[hits] / result[QUERIES] if result.get(QUERIES) else None for hits in (HITS, AWAY_HITS)]
        notes = [failures_of(result), *(f"{name} {result[name]:.0f}" for name in LOST if result.get(name))]
        if row in (AWAY, FIRST, LATER) and tier in (Tier.HOST, Tier.DISK) and not shares[1]:
            notes.append("NO PAGE CAME BACK")
        for title, of, cells in (
            (f"{row}, {tier}", result, (*shares, result["foreign_cores"], "; ".join(filter(None, notes)))),
            (f"{row}, {tier}: visitors", result.get("visitors"), (None, None, None, "")),
        ):
            if of is not None:
                itl = both_of(of, "itl", 1)
                table.row(title, of["completed"], of["output_tokens_per_s"], both_of(of, "ttft"), itl, *cells)
    lines = [*table.lines, ""]
    for metric, above, below, goal in RATIOS:
        if above in measured and below in measured:
            text = " / ".join(f"{row}, {tier}" for row, tier in (above, below))
            line = ratio_of_rounds(text, metric, measured[above], measured[below])
            lines.append(f"{line}; goal {goal}" if goal else line)
    return "\n".join(lines)


def bench(args: argparse.Namespace) -> int:
    """Runs all rows in all rounds, prints the table, and returns the exit code: 1 if a request failed."""
    random = np.random.default_rng(args.seed)
    chats = Conversations(args.conversations, args.lengths, 1 + MOST_TURNS * args.rounds, random)
    check(args, chats)
    tiers = [tier for tier in args.tiers if tier is not Tier.LLAMA or args.llama_server is not None]
    say_head()
    if Tier.LLAMA in args.tiers and Tier.LLAMA not in tiers:
        say("llama-server is left out: there is no --llama-server\n")
    with ScratchFolder() as scratch:
        servers = servers_of(args, chats, scratch.path)
        with ExitStack() as stack:
            running = {
                tier: stack.enter_context(servers.start(tier, port)) for port, tier in enumerate(tiers, args.port)
            }
            measured = rounds(running, chats, args)
        say(f"\n{table(measured)}\n")
        restarted: Rows = {}
        for tier in (tier for tier in tiers if tier in (Tier.DISK, Tier.LLAMA)):
            say(f"{tier}: restarts")
            start = partial(servers.start, tier, args.port, name="restarts-")
            sizes = {"prefix_len": args.prefix_len, "page_size": args.page_size, "rounds": args.rounds}
            for row, parts in restarts(start, tier, **sizes, random=random).items():
                restarted[row, tier] = parts
    if restarted:
        say(f"\n{table(restarted)}")
    measured |= restarted
    if args.output_json:
        results = {f"{row}, {tier}": [part.results() for part in parts] for (row, tier), parts in measured.items()}
        args.output_json.write_text(json.dumps(results, indent=2) + "\n")
    outcomes = [o for parts in measured.values() for part in parts for o in (*part.outcomes, *part.visits)]
    return 1 if any(outcome.error for outcome in outcomes) else 0


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    args = parser().parse_args(argv)
    return run_command("kv_offloading", lambda: bench(args), debug=args.debug)
