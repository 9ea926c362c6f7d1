"""Loads an OpenAI-compatible server with streamed requests and reports latencies and throughput.

python -m scripts.lab serving --max-concurrency 16 --num-prompts 64 --output-len lognormal:64:0.7:16:256
python -m scripts.lab serving --request-rate 4 --dataset trace --dataset-path trace.csv --scale 0.1
python -m scripts.lab serving --find-goodput ttft=500,tpot=50 --dataset trace --dataset-path trace.csv --scale 0.1
"""

from __future__ import annotations

import argparse
import json
import math
import urllib.request
from typing import Any

import numpy as np
import uvloop

from model.inputs.json_file import json_argument
from model.inputs.paths import local_path
from scripts.flags.errors import FailedError, add_debug_flag, run_command
from scripts.lab.load.arrivals import arrival_times, at_rate
from scripts.lab.load.client import Outcome, Target, run
from scripts.lab.load.goodput import MOST_TRIALS, Trial, best_of, find_rate, passes
from scripts.lab.load.goodput import table as goodput_table
from scripts.lab.load.lengths import Lengths, Trace
from scripts.lab.load.metrics import METRICS, summary, table
from scripts.lab.load.workload import BenchRequest, from_file, from_trace, random_prompts
from scripts.lab.tables import say_head
from server.flag import EachCounts

GOODPUT_SHARE = 0.9  # of the requests of a rate that must meet the objectives


def json_object(text: str) -> dict[str, Any]:
    """Parses a flag's value. Raises ArgumentTypeError if it is not a JSON object."""
    value = json_argument(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"not a JSON object: {text}")
    return value


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    p = argparse.ArgumentParser(prog="python -m scripts.lab serving", description=__doc__.splitlines()[0])
    server = p.add_argument_group("server")
    server.add_argument("--base-url", default="http://127.0.0.1:8000")
    server.add_argument("--model", help="default: the first one that the server lists")
    server.add_argument("--api-key")
    server.add_argument("--endpoint", choices=("completions", "chat"), default="completions")
    server.add_argument("--temperature", type=float, default=0.0)
    server.add_argument("--ignore-eos", action="store_true", help="ask for outputs of exactly the drawn lengths")
    server.add_argument("--no-usage", action="store_true", help="do not ask for usage: tokens are counted by chunks")
    server.add_argument("--extra-body", type=json_object, default={}, help="JSON object added to every request")
    load = p.add_argument_group("load")
    load.add_argument("--num-prompts", type=int, default=64)
    load.add_argument("--max-concurrency", type=int, help="requests in flight; alone it is a closed loop")
    load.add_argument("--request-rate", help="requests per second, 'inf', or 'trace': at the trace's own times")
    load.add_argument("--burstiness", type=float, default=1.0, help="1: Poisson; below: bursts; above: more regular")
    load.add_argument("--num-warmups", type=int, default=0, help="requests sent before the clock starts")
    work = p.add_argument_group("requests")
    work.add_argument("--dataset", choices=("random", "trace", "jsonl"), default="random")
    work.add_argument("--dataset-path", type=local_path)
    work.add_argument("--input-len", type=Lengths.parse, default=Lengths.parse("128"), metavar="LENGTHS")
    work.add_argument(
        "--output-len",
        type=Lengths.parse,
        metavar="LENGTHS",
        help="N, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA:LOW:HIGH, in tokens (default 64)",
    )
    work.add_argument("--prefix-len", type=int, default=0, help="tokens that all random prompts begin with")
    work.add_argument("--prompt-format", choices=("ids", "text"), default="text", help="ids have exact lengths")
    work.add_argument("--vocab-size", type=int, default=1000, help="token ids are drawn below nine tenths of it")
    work.add_argument("--scale", type=float, default=1.0, help="factor on the trace's lengths")
    work.add_argument("--max-total-len", type=int, default=1 << 30, help="prompt and output of a trace's request")
    work.add_argument("--trace-start", type=int, default=0, help="first request of the trace to use")
    work.add_argument("--seed", type=int, default=0)
    report = p.add_argument_group("report")
    report.add_argument("--percentile-metrics", default=",".join(METRICS))
    report.add_argument("--metric-percentiles", default="50,90,99")
    report.add_argument(
        "--goodput", nargs="+", action=EachCounts, default=[], metavar="METRIC:MS", help="such as ttft:200 tpot:50"
    )
    report.add_argument(
        "--find-goodput",
        metavar="SLOS",
        help="such as ttft=500,tpot=50: the highest rate at which nine of ten requests meet them, by trials of "
        "--num-prompts requests",
    )
    report.add_argument("--output-json", type=local_path)
    report.add_argument("--label", default="", help="kept in the JSON result")
    add_debug_flag(p)
    return p


def build_requests(args: argparse.Namespace, random: np.random.Generator) -> list[BenchRequest]:
    """The requests that the flags describe. Raises ValueError if the flags contradict each other."""
    prompt_options = {
        "as_ids": args.prompt_format == "ids",
        "vocab_size": args.vocab_size,
        "shared_prefix": args.prefix_len,
        "random": random,
    }
    if args.dataset != "random" and args.dataset_path is None:
        raise ValueError(f"--dataset {args.dataset} needs --dataset-path")
    if args.dataset == "trace":
        trace = Trace.read(args.dataset_path).window(args.trace_start, args.num_prompts)
        trace = trace.scaled(args.scale, args.max_total_len)
        return from_trace(trace, random_prompts(trace.input_lens, **prompt_options))
    output_lens = (args.output_len or Lengths.parse("64")).draw(args.num_prompts, random)
    if args.dataset == "jsonl":
        default = int(output_lens[0]) if args.output_len is not None else None
        return from_file(args.dataset_path, default)[: args.num_prompts]
    prompts = random_prompts(args.input_len.draw(args.num_prompts, random), **prompt_options)
    return [BenchRequest(prompt, int(n)) for prompt, n in zip(prompts, output_lens, strict=True)]


def build_arrivals(args: argparse.Namespace, requests: list[BenchRequest], random: np.random.Generator) -> Any:
    """The arrival of each request in seconds; None for a closed loop."""
    if args.request_rate is None:
        if args.max_concurrency is None:
            raise ValueError("give --max-concurrency (closed loop), --request-rate, or both")
        return None
    if args.request_rate == "trace":
        if any(request.arrival_s is None for request in requests):
            raise ValueError("--request-rate trace needs --dataset trace")
        return [request.arrival_s for request in requests]
    return arrival_times(len(requests), rate=float(args.request_rate), burstiness=args.burstiness, random=random)


def parse_slos(items: list[str], flag: str = "--goodput") -> dict[str, float]:
    """Metric -> limit in milliseconds, from METRIC:MILLISECONDS. Raises ValueError if an item has another form."""
    slos = {}
    for item in items:
        name, _, limit = item.partition(":")
        if name not in METRICS or not limit:
            raise ValueError(f"{flag} {item!r}: it is METRIC:MILLISECONDS, the metric one of {METRICS}")
        slos[name] = float(limit)
        if not (slos[name] > 0 and math.isfinite(slos[name])):
            raise ValueError(f"{flag} {item!r}: the limit must be positive")
    return slos


def first_model(base_url: str, api_key: str | None) -> str:
    """The name of the first model that the server lists. Raises ValueError if it lists none."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    request = urllib.request.Request(base_url.rstrip("/") + "/v1/models", headers=headers)
    with urllib.request.urlopen(request, timeout=30) as response:
        answer = json.load(response)
    try:
        return answer["data"][0]["id"]
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{base_url}/v1/models lists no model: give --model") from error


async def measure(
    target: Target, requests: list[BenchRequest], arrivals: Any, *, max_concurrency: int | None, num_warmups: int
) -> tuple[list[Outcome], float]:
    """The outcomes, and the seconds of the run. Raises FailedError if a warm-up request fails."""
    if num_warmups:
        warm, _ = await run(target, requests[:num_warmups], arrivals=None, max_concurrency=max_concurrency or 4)
        errors = [outcome.error for outcome in warm if outcome.error]
        if errors:
            raise FailedError(f"the warm-up failed: {errors[0]}")
    return await run(target, requests, arrivals=arrivals, max_concurrency=max_concurrency)


def find_goodput(args: argparse.Namespace, target: Target) -> int:
    """Finds the highest rate within the objectives, prints the trials, and returns the exit code: 1 if no rate is.

    Each trial has requests of its own: a prefix cache would know the old ones. Those of a trace come at the trace's
    times, which are shortened to the rate.
    """
    if args.request_rate == "trace":
        raise ValueError("--find-goodput begins at a number of requests per second: --request-rate")
    slos = parse_slos(args.find_goodput.replace("=", ":").split(","), "--find-goodput")
    seeds = iter(range(args.seed, args.seed + MOST_TRIALS))

    def attempt(rate: float) -> Trial:
        random = np.random.default_rng(next(seeds))
        requests = build_requests(args, random)
        times = [request.arrival_s for request in requests if request.arrival_s is not None]
        arrivals = at_rate(np.array(times), rate) if times else None
        if arrivals is None:
            arrivals = arrival_times(len(requests), rate=rate, burstiness=args.burstiness, random=random)
        outcomes, seconds = uvloop.run(
            measure(target, requests, arrivals, max_concurrency=args.max_concurrency, num_warmups=args.num_warmups)
        )
        result = summary(outcomes, seconds, slos_ms=slos)
        return Trial(rate, result, passes(result, share=GOODPUT_SHARE))

    trials = find_rate(attempt, start=float(args.request_rate or 1.0))
    say_head()
    print(goodput_table(trials, slos, needed=GOODPUT_SHARE))
    if args.output_json:
        rows = [{"rate": trial.rate, "passed": trial.passed, **trial.result} for trial in trials]
        args.output_json.write_text(json.dumps({"label": args.label, "trials": rows}, indent=2) + "\n")
    return 0 if best_of(trials) else 1


def bench(args: argparse.Namespace) -> int:
    """Loads the server, prints the table, and returns the exit code: 1 if a request failed."""
    random = np.random.default_rng(args.seed)
    requests = build_requests(args, random)
    arrivals = None if args.find_goodput else build_arrivals(args, requests, random)
    slos = parse_slos(args.goodput)
    if not requests:
        raise ValueError("there is no request to send: see --num-prompts and --dataset-path")
    if args.max_concurrency is not None and args.max_concurrency < 1:
        raise ValueError(f"--max-concurrency must be at least 1, not {args.max_concurrency}")
    metrics = [name for name in args.percentile_metrics.split(",") if name]
    unknown = set(metrics) - set(METRICS)
    if unknown:
        raise ValueError(f"--percentile-metrics: {sorted(unknown)} are not among {METRICS}")
    percentiles = [float(p) for p in args.metric_percentiles.split(",")]
    if not all(0 <= p <= 100 for p in percentiles):
        raise ValueError(f"--metric-percentiles are from 0 to 100: {args.metric_percentiles}")
    target = Target(
        base_url=args.base_url,
        model=args.model or first_model(args.base_url, args.api_key),
        chat=args.endpoint == "chat",
        temperature=args.temperature,
        ignore_eos=args.ignore_eos,
        include_usage=not args.no_usage,
        extra_body=args.extra_body,
        api_key=args.api_key,
    )
    target.body(requests[0])
    if args.find_goodput:
        return find_goodput(args, target)
    outcomes, duration_s = uvloop.run(
        measure(target, requests, arrivals, max_concurrency=args.max_concurrency, num_warmups=args.num_warmups)
    )
    result = summary(outcomes, duration_s, metrics=metrics, percentiles=percentiles, slos_ms=slos)
    load = f"{args.request_rate} requests/s" if args.request_rate else "closed loop"
    concurrency = f", at most {args.max_concurrency} in flight" if args.max_concurrency else ""
    say_head()
    print(table(result, f"{target.model}: {len(requests)} requests, {load}{concurrency}"))
    if args.output_json:
        settings = {key: str(value) for key, value in vars(args).items() if key != "api_key" and value is not None}
        args.output_json.write_text(json.dumps({"label": args.label, "settings": settings, **result}, indent=2) + "\n")
    return 1 if result["failed"] else 0


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    args = parser().parse_args(argv)
    return run_command("serving", lambda: bench(args), debug=args.debug)
