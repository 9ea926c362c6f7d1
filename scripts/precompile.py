"""Makes a server's programs for chips that are not here, so that its first start finds them:

    python -m scripts.precompile --target v6e:1x1 --model MODEL --max-model-len 8192 --compile-cache FOLDER
    scripts/serve --model MODEL --max-model-len 8192 --compile-cache FOLDER

FOLDER may be in an image or in a bucket. Give it all flags of the engine that the start has: most of them decide
the programs. So do the versions of this program, of jax and of libtpu. A start says how many of its programs it has
found, and what differs if it has found none. With `--models`, the programs of each shape and form are made. Weights are
looked at, but not loaded: with `--load-format dummy`, `config.json` is enough for a model whose checkpoint is not
quantised.

For GPUs (`--target h100`, `--target 8xh100`) the programs are traced, kernels included. They are compiled, too, if
FOLDER has been the folder of a start on such GPUs, or has a copy of what it left there: XLA's description of these GPUs
and its choices of kernels, which it times there. A program with a product that was not timed stays traced. This needs
the CUDA plug-in of jax, and no driver.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace as with_fields

from model.inputs.words import report_lines
from scripts.building.described_chips import GpuTopology, be_on, described_in, topology_named
from scripts.building.device import compile_cache_folder
from scripts.flags.errors import add_debug_flag, run_command
from scripts.flags.parsing import parse_flags
from scripts.flags.settings import EngineSettings, add_engine_flags

if TYPE_CHECKING:
    from scripts.building.described_chips import TpuTopology
    from scripts.building.device import Report
    from scripts.building.runner import Built


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    p = argparse.ArgumentParser(
        prog="python -m scripts.precompile", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    p.add_argument(
        "--target", required=True, metavar="CHIPS", help="all chips of the host: v6e:1x1, v5p:2x2x1, h100, 8xh100"
    )
    add_engine_flags(p)
    add_debug_flag(p)
    return p


def precompile(settings: EngineSettings, topology: TpuTopology | GpuTopology, report: Report) -> None:
    """Makes the programs that are not in the cache yet. It must be called before jax is imported.

    Raises:
        ValueError: the settings cannot be used, or the compiler for the target is missing.
        OSError: a program cannot be stored.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # XLA logs each kernel that no GPU has timed
    be_on(topology)
    fill_all(settings, topology.name, report, is_exact=getattr(topology, "said", None) is not None)


def fill_all(settings: EngineSettings, target: str, report: Report, *, is_exact: bool = True) -> None:
    """Makes the programs of --model, and those of each other shape and form of --models. The errors and `is_exact` are
    those of `fill`."""
    from scripts.building.engine_plans import plan_engines
    from scripts.building.runner import build_runner

    for plan in plan_engines(settings, report, None):
        if plan.settings.model != settings.model:
            report(f"  model             {plan.settings.model}, by programs of its own")
        built = build_runner(plan.settings, report, only_programs=True, plan=plan)
        context = built.info.max_model_len
        if settings.max_model_len is None and context < plan.weights.config.max_position_embeddings:
            report(f"  context           give the start --max-model-len {context}, too: its memory may differ")
        fill(built, target, report, is_exact=is_exact)


def fill(built: Built, target: str, report: Report, *, is_exact: bool = True) -> None:
    """Makes the programs of a runner, unless they are in the cache. Raises OSError if one cannot be stored there.

    Args:
        is_exact: XLA itself has described the target. A GPU's programs are compiled only then.
    """
    from model.compiling.compile_cache import filling
    from scripts.building.attention_backend import compile_self_test
    from scripts.building.precompiled import CHOICES, Made, facts_of_compiled, made_before, program_facts

    started, folder = time.perf_counter(), built.plan.device.folders.programs
    if folder is None:
        raise ValueError("--compile-cache: there is no folder in which programs can be kept; name one of your own")
    plan, attention = built.plan, built.loader.attention
    facts, buckets = program_facts(built.runner, plan.facts(attention)), plan.ladder.buckets()
    is_gpu = plan.device.platform == "gpu"
    compiles_gpu = is_gpu and is_exact and isinstance(folder, Path) and (folder / CHOICES).is_dir()
    count = len(buckets) + len(built.runner.described.updates())
    made = Made(target=target, facts=facts, programs=count)
    if compiles_gpu:
        made = with_fields(made, compiled=count, compiled_for=facts_of_compiled())
    if made_before(folder, facts) == made:
        report(f"{folder} has these {count} programs for {target} already")
        return
    if is_gpu:
        programs, kind = built.runner.programs, "traced programs"
        with filling():
            num_compiled = programs.make_elsewhere(buckets, compiles=compiles_gpu)
        if programs.untraced(buckets):
            raise OSError(f"--compile-cache: {folder} cannot be written to")
        if compiles_gpu:
            made = with_fields(made, compiled=num_compiled)
            kind = f"programs, {num_compiled} of them compiled,"
            if num_compiled < count:
                report(f"  {count - num_compiled} are only traced: no such GPU has timed all of their products")
    else:
        with filling():
            built.runner.compile(buckets, lambda line: report(f"  {line}"))
            num_tests = compile_self_test(
                plan.settings,
                attention,
                plan.ladder.config,
                platform=plan.device.platform,
                max_model_len=built.info.max_model_len,
            )
        kind = f"programs and {num_tests} of the self-test" if num_tests else "programs"
    made.write(folder)
    report(f"{folder} has {count} {kind} for {target}, made in {time.perf_counter() - started:.1f} s")


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    args = parse_flags(parser(), argv)
    return run_command("precompile", lambda: _precompile(args), debug=args.debug)


def _precompile(args: argparse.Namespace) -> int:
    """Runs the command. Errors are raised."""
    topology = topology_named(args.target)
    if args.device not in ("auto", topology.backend):
        raise ValueError(f"--device {args.device}: --target names the device")
    if args.compile_cache == "none":
        raise ValueError("--compile-cache none: it names the folder that is filled")
    args.device = topology.backend
    folder = compile_cache_folder(args.compile_cache)
    if isinstance(topology, GpuTopology) and folder is not None:
        topology = replace(topology, said=described_in(folder, topology.name) or topology.said)
    precompile(EngineSettings.from_namespace(args), topology, lambda line: print(report_lines(line, verbose=True)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
