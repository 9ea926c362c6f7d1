"""Plans a deployment without the chips: memory, speed under a workload, the best settings, the command and the cost.

    scripts/plan --model 8b --target v6e:1x1
    scripts/plan --model 8b --target v6e:2x4 --workload chat --slo ttft_ms=500,tpot_ms=40 --price-per-hour 22
    scripts/plan --model 8b --target h100 --workload chat --target-itl 50 --target-ttft 500
    scripts/plan --model 70b --target 8xh100 --workload 1000/1000 --max-concurrency 128
    scripts/plan --model 8b --target h200 --num-models 7 --workload chat --slo ttft_ms=2000,tpot_ms=100
    scripts/plan --model 8b --target 1xh100 --workload rag --slo ttft_ms=2000 --html plan.html

The memory of each chip is counted from shapes, and the largest step is compiled by the chip's own compiler, without the
chip. With --workload, the server's own scheduler runs it in simulated time, over steps whose times are estimated from
bytes and operations. Every line says whether its figures are counted, estimated or compiled.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from model.inputs.paths import local_path
from scripts.flags.errors import add_debug_flag, run_command
from scripts.flags.parsing import parse_flags
from scripts.flags.settings import add_engine_flags
from scripts.lab.planning.cost import ApiPrice
from scripts.lab.planning.page import add_listed_prices, answer_choices, write_file
from scripts.lab.planning.planner import COMPILE, Planner
from scripts.lab.planning.plot import check_installed
from scripts.lab.planning.target import parse_target


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    p = argparse.ArgumentParser(
        prog="scripts/plan", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    chips = p.add_argument_group("chips")
    chips.add_argument("--target", default="h100", help="v6e:2x4, 8xh100, or a chip's name alone (default: h100)")
    chips.add_argument("--device-memory", type=float, metavar="GIB", help="in place of the chip's own")
    chips.add_argument(
        "--compile",
        nargs="?",
        const="full",
        choices=COMPILE,
        help="count the memory of the largest step with the target's own compiler: all layers (the default where it is "
        "installed), from one and two, or not at all",
    )
    chips.add_argument("--no-compile", dest="compile", action="store_const", const="none", help="as --compile none")
    load = p.add_argument_group("workload")
    load.add_argument("--workload", help="chat, rag, code, PROMPTS/OUTPUTS in tokens (1800/128), or a trace as CSV")
    load.add_argument("--slo", help="limits of latency, as ttft_ms=500,tpot_ms=40 (p95; percentile=99 changes it)")
    load.add_argument("--request-rate", type=float, help="requests per second (default: the most within --slo)")
    load.add_argument(
        "--no-simulate",
        action="store_true",
        help="estimate means of the steady state in place of simulating the scheduler, at once",
    )
    load.add_argument(
        "--num-models", type=int, metavar="N", help="models of this shape in one engine, which requests name evenly"
    )
    load.add_argument("--max-concurrency", type=int, metavar="N", help="clients that each send one request at a time")
    price = p.add_argument_group("cost")
    price.add_argument("--price-per-hour", type=float, help="of all chips of the target together")
    price.add_argument(
        "--api-price",
        action="append",
        default=[],
        metavar="[NAME=]IN[/OUT]",
        help="of a million tokens: when does renting pay? May be given again",
    )
    price.add_argument("--currency", metavar="NAME", help="of all prices, as the report writes it (default: USD)")
    report = p.add_argument_group("report")
    report.add_argument("--shapes", action="store_true", help="list the padded shapes of the programs")
    report.add_argument("--json", action="store_true", help="print one JSON object in place of the lines")
    report.add_argument(
        "--html",
        type=local_path,
        metavar="FILE",
        help="write the server's page with this plan, as one file (default of prices: those of prices.json)",
    )
    # The server's own way to ask, with the flags of its model: choices of the page's form on stdin.
    report.add_argument("--answer-choices", metavar="NAME", help=argparse.SUPPRESS)
    report.add_argument("--plot", type=local_path, metavar="FILE.png", help="throughput against latency (matplotlib)")
    add_engine_flags(p)
    add_debug_flag(p)
    p.set_defaults(tensor_parallel_size=None)
    return p


def check(args: argparse.Namespace) -> None:
    """Raises ValueError, naming the flag, for a value out of range or a flag without its companion."""
    for name in ("device_memory", "request_rate", "max_concurrency", "price_per_hour"):
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"--{name.replace('_', '-')} must be positive, not {value:g}")
    for name in ("slo", "request_rate", "max_concurrency", "price_per_hour", "plot", "html"):
        if getattr(args, name) is not None and args.workload is None:
            raise ValueError(f"--{name.replace('_', '-')} needs --workload: chat, rag, code, 1800/128 or a trace")
    # Settings that the simulation does not follow.
    followed = {"speculative_config": None, "pipeline_depth": 2, "enable_embeddings": False}
    for name, only in followed.items():
        if args.workload is not None and getattr(args, name) != only:
            raise ValueError(f"--{name.replace('_', '-')} is not simulated: leave it out of a plan with --workload")
    if args.num_models is not None and (args.num_models < 2 or args.models or args.models_folder):
        raise ValueError(f"--num-models {args.num_models}: it is at least 2, in place of --models and --models-folder")
    has_models = args.num_models or args.models or args.models_folder
    if args.workload is not None and has_models and args.no_simulate:
        raise ValueError("--num-models, --models: several models are simulated, without --no-simulate")
    if args.slo is not None and (args.target_itl is not None or args.target_ttft is not None):
        raise ValueError(
            "--slo and --target-itl or --target-ttft exclude each other: an engine keeps its targets itself"
        )
    if args.request_rate is not None and args.max_concurrency is not None:
        raise ValueError("--request-rate and --max-concurrency exclude each other")
    for name in ("api_price", "currency"):
        if getattr(args, name) and args.price_per_hour is None:
            raise ValueError(f"--{name.replace('_', '-')} needs --price-per-hour")
    for price in args.api_price:
        ApiPrice.parse(price)
    if args.plot is not None:
        check_installed()


def planned(argv: Sequence[str]) -> Planner:
    """The planner for flags. Raises ValueError, naming the flag."""
    args = parse_flags(parser(), argv)
    check(args)
    return Planner(args)


def run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Plans and prints."""
    check(args)
    if args.answer_choices is not None:
        served = ["--model", args.model, "--load-format", args.load_format]
        answer_choices(planned, served, args.answer_choices)
        return 0
    if args.html is not None:
        add_listed_prices(args, parse_target(args.target))
    planner = Planner(args)
    print(json.dumps(planner.figures(), indent=2) if args.json else "\n".join(planner.lines()))
    if args.html is not None:
        write_file(args.html, planner, argv)
    return 0


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse_flags(parser(), argv)
    return run_command("plan", lambda: run(args, argv), debug=args.debug)
