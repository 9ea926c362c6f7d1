"""Times the compiled step itself, without engine, server or tokens of meaning, next to what its products cost alone.

python -m scripts.bench_step --model FOLDER --load-format dummy --dtype float32 --rows 1,4,16,64 --context 256
python -m scripts.bench_step --model preset:llama-3.2-1b --load-format dummy --prefill 128,512 --variant sample
python -m scripts.bench_step --dispatch llama-3.1-8b,llama-3.1-70b   # what a call with so many arguments costs the host
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from batcher.step import Bucket, Variant
from model.inputs.paths import local_path
from scripts.benchmarks.step_timing import time_bucket
from scripts.wiring.errors import add_debug_flag, run_command
from scripts.wiring.settings import EngineSettings, add_engine_flags


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    p = argparse.ArgumentParser(prog="python -m scripts.bench_step", description=__doc__.splitlines()[0])
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
    step.add_argument("--dispatch", type=_names, help="time only calls with the arguments of these presets' steps")
    step.add_argument("--json", type=local_path, help="write the figures here, too")
    add_debug_flag(p)
    return p


def bench(args: argparse.Namespace, argv: list[str]) -> int:
    """Times each step and its matrix products alone, prints them, and returns the exit code."""
    if args.dispatch:
        return bench_dispatch(args.dispatch)
    from scripts.wiring.engine import build_runner

    needed = args.context + max([*args.prefill, args.steps + 8])
    settings = EngineSettings.from_namespace(args)
    settings = EngineSettings.from_keywords(
        **asdict(settings)
        | {
            "max_model_len": settings.max_model_len or needed,
            "max_num_seqs": max(args.rows),
            "max_num_batched_tokens": max([*args.prefill, max(args.rows) + 1]),
        }
    )
    built = build_runner(settings, print)
    runner = built.runner
    prefills = [Bucket(n, 1, args.variant) for n in args.prefill if n > 1]
    shapes = [*(Bucket(n, n, args.variant) for n in args.rows), *prefills]
    runner.warm_up(shapes, print)
    sampling = {"temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k}
    timings = []
    print(f"{'':18}{'step ms':>9}{'slowest':>9}{'tok/s':>9}{'dispatch ms':>13}{'products ms':>13}{'ratio':>7}")
    for bucket in shapes:
        timing = time_bucket(runner, bucket, context=args.context, steps=args.steps, sampling=sampling)
        timings.append(timing)
        name = f"decode {bucket.num_rows}" if bucket.decode_only else f"prefill {bucket.num_tokens}"
        print(
            f"{name:18}{timing.step_ms:9.2f}{timing.slowest_ms:9.2f}{timing.tokens_per_s:9.0f}"
            f"{timing.dispatch_ms:13.3f}{timing.products_ms:13.2f}{timing.ratio:7.2f}",
            flush=True,
        )
    if args.json:
        figures = [asdict(t) | {"tokens_per_s": t.tokens_per_s, "ratio": t.ratio} for t in timings]
        args.json.write_text(json.dumps({"command": argv, "steps": figures}, indent=1))
    return 0


def bench_dispatch(presets: list[str]) -> int:
    """Times a call with the arguments of each preset's step, on one device and on all of them."""
    import jax

    from scripts.benchmarks.dispatch import time_dispatch

    print(f"{'':18}{'devices':>9}{'layers':>9}{'arguments':>11}{'wall us':>9}{'CPU us':>9}")
    for name in presets:
        for num_devices in sorted({1, len(jax.devices())}):
            call = time_dispatch(name, num_devices)
            print(
                f"{name:18}{num_devices:9}{call.num_layers:9}{call.num_arguments:11}{call.wall_us:9.0f}{call.cpu_us:9.0f}",
                flush=True,
            )
    return 0


def _names(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def _ints(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def main(argv: list[str]) -> int:
    """The command; returns its exit code."""
    args = parser().parse_args(argv)
    return run_command("bench_step", lambda: bench(args, argv), debug=args.debug)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
