"""Times the compiled step itself, without engine, server or tokens of meaning, next to what its products cost alone.

python -m scripts.lab step --model FOLDER --load-format dummy --dtype float32 --rows 1,4,16,64 --context 256
python -m scripts.lab step --model preset:llama-3.2-1b --load-format dummy --prefill 128,512 --variant sample
python -m scripts.lab step --rows 1,4,16 --in-engine      # decodes alone, and the same in an engine with its threads
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from batcher.step import Bucket, Variant
from model.inputs.paths import local_path
from scripts.flags.errors import add_debug_flag, run_command
from scripts.flags.parsing import parse_flags
from scripts.flags.settings import EngineSettings, add_engine_flags
from scripts.lab.step_timing import Timing, time_bucket
from scripts.lab.tables import Table, say, say_head

if TYPE_CHECKING:
    from model.execution.runner import ModelRunner
    from scripts.lab.in_engine import InEngine


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    p = argparse.ArgumentParser(prog="python -m scripts.lab step", description=__doc__.splitlines()[0])
    add_engine_flags(p)
    step = p.add_argument_group("steps")
    step.add_argument("--rows", type=_ints, default=[1, 4, 16, 64], help="decode steps of so many rows")
    step.add_argument("--prefill", type=_ints, default=[128, 512], help="steps of one prompt chunk of so many tokens")
    step.add_argument("--context", type=int, default=256, help="tokens already in pages")
    step.add_argument("--variant", type=Variant, default=Variant.GREEDY, choices=[Variant.GREEDY, Variant.SAMPLE])
    step.add_argument("--temperature", type=float, default=1.0, help="with --variant sample")
    step.add_argument("--top-p", type=float, default=1.0, help="with --variant sample")
    step.add_argument("--top-k", type=int, default=0, help="with --variant sample")
    step.add_argument("--steps", type=int, default=20)
    step.add_argument("--in-engine", action="store_true", help="print decode steps as the engine sees them, too")
    step.add_argument("--json", type=local_path, help="write the figures here, too")
    add_debug_flag(p)
    return p


def bench(args: argparse.Namespace, argv: list[str]) -> int:
    """Times each step and its matrix products alone, prints them, and returns the exit code."""
    import jax

    from scripts.building.runner import build_runner
    from scripts.lab.in_engine import num_drawn

    budget = max([*args.prefill, max(args.rows) + 1])
    drawn = num_drawn(max(args.rows), args.context, args.steps, budget) if args.in_engine else args.steps + 8
    needed = args.context + max([*args.prefill, drawn])
    settings = EngineSettings.from_namespace(args)
    settings = EngineSettings.from_keywords(
        **asdict(settings)
        | {
            "max_model_len": settings.max_model_len or needed,
            "max_num_seqs": max(args.rows),
            "max_num_batched_tokens": budget,
        }
    )
    built = build_runner(settings, print)
    runner = built.runner
    prefills = [Bucket(n, 1, args.variant) for n in args.prefill if n > 1]
    shapes = [*(Bucket(n, n, args.variant) for n in args.rows), *prefills]
    runner.warm_up(shapes, print)
    sampling = {"temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k}
    timings = []
    say_head(jax.devices()[0].device_kind)
    formats = {"step ms": "7.2f", "slowest": "7.2f", "tok/s": "7.0f", "dispatch ms": "7.3f", "products ms": "7.2f"}
    table = Table({"": "<18", **formats, "ratio": "5.2f"}, say)
    for bucket in shapes:
        t = time_bucket(runner, bucket, context=args.context, steps=args.steps, sampling=sampling)
        timings.append(t)
        name = f"decode {bucket.num_rows}" if bucket.decode_only else f"prefill {bucket.num_tokens}"
        table.row(name, t.step_ms, t.slowest_ms, t.tokens_per_s, t.dispatch_ms, t.products_ms, t.ratio)
    inside = in_engine(args, runner, timings) if args.in_engine else []
    if args.json:
        figures: list[dict[str, Any]] = [
            asdict(t) | {"tokens_per_s": t.tokens_per_s, "ratio": t.ratio} for t in timings
        ]
        told = {"command": argv, "steps": figures, "in_engine": [asdict(figures) for figures in inside]}
        args.json.write_text(json.dumps(told, indent=1))
    return 0


def in_engine(args: argparse.Namespace, runner: ModelRunner, alone: list[Timing]) -> list[InEngine]:
    """Times the decode steps again, in an engine, and prints them next to those of the runner alone."""
    from scripts.lab.in_engine import time_in_engine

    temperature = args.temperature if args.variant is Variant.SAMPLE else 0.0
    sampling = {"temperature": temperature, "top_p": args.top_p, "top_k": args.top_k}
    say("\nin the engine, ms from result to result and their parts (delivery and next overlap with the device):\n")
    formats = {"dispatch": "7.3f", "device": "7.2f", "idle": "7.3f", "delivery": "7.3f", "next": "7.3f"}
    table = Table({"": "<18", "alone": "7.2f", "step": "7.2f", "ratio": "5.2f", **formats}, say)
    found = []
    for timing in alone:
        if timing.num_tokens != timing.num_rows:
            continue
        lengths = {"context": args.context, "steps": args.steps, "pipeline_depth": args.pipeline_depth}
        e = time_in_engine(runner, timing.num_rows, sampling=sampling, **lengths)
        found.append(e)
        steps = timing.step_ms, e.step_ms, e.step_ms / timing.step_ms
        table.row(f"decode {e.num_rows}", *steps, e.dispatch_ms, e.device_ms, e.idle_ms, e.delivery_ms, e.next_ms)
    return found


def _ints(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    args = parse_flags(parser(), argv)
    return run_command("step", lambda: bench(args, argv or sys.argv[1:]), debug=args.debug)
