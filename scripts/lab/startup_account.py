"""The cost of a start on chips that are not here: its programs, each compiled by the target's own compiler.

CPU seconds are those of this machine, on which other work makes them longer. Programs share nothing but what JAX keeps
of small functions that were traced before: each holds all of its code, so what two of them have in common is compiled
twice.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from batcher.buckets import BucketLadder
from batcher.step import Bucket, Variant, longest_first
from pallas_kernels.chips import GIB, GPU_POOL_SHARE
from scripts.building.tracers import num_tracers
from scripts.flags.errors import FailedError
from scripts.flags.parsing import parse_flags
from scripts.flags.settings import add_engine_flags
from scripts.lab.accounts.process import CompilerError
from scripts.lab.planning.compiled import obstacle
from scripts.lab.planning.ladder import (
    NOTHING,
    Cost,
    Entry,
    Question,
    costs,
    entries,
    name_of,
    ready_after,
    traced_after,
)
from scripts.lab.planning.memory import size_up
from scripts.lab.planning.planner import read_settings
from scripts.lab.planning.target import parse_target
from scripts.lab.tables import Table, say, say_head
from server.flag import EachCounts

UPDATES = ("patch", "bring masks", "reset history")  # the programs besides the steps, as `StepPrograms` names them


def add_flags(p: argparse._ArgumentGroup) -> None:
    """The flags of this account."""
    p.add_argument("--target", metavar="CHIPS", help="count the programs for v6e:1x1, h100, ... and start no server")
    p.add_argument(
        "--programs",
        nargs="+",
        action=EachCounts,
        default=[],
        metavar="NAME",
        help="compile these only, as greedy:64",
    )
    p.add_argument(
        "--layers",
        nargs="+",
        action=EachCounts,
        type=int,
        metavar="N",
        help="compile one or two depths in place of all layers",
    )
    p.add_argument("--cores", type=int, default=44, help="of the machine that compiles (default: 44)")


def check(args: argparse.Namespace) -> None:
    """Raises ValueError, naming the flag."""
    depths = args.layers or [1]
    if len(depths) > 2 or min(depths) < 1 or len(set(depths)) < len(depths):
        raise ValueError(f"--layers {' '.join(map(str, depths))}: it is one number of layers, or two different ones")
    if args.cores < 1:
        raise ValueError(f"--cores {args.cores}: it is at least 1")


def account(args: argparse.Namespace, flags: Sequence[str]) -> int:
    """Compiles, prints the table, and returns the exit code.

    Args:
        flags: of the engine.

    Raises:
        ValueError: the target has no compiler here, or there is no such program.
        FailedError: the compiler refuses.
    """
    check(args)
    engine = argparse.ArgumentParser(prog="python -m scripts.lab startup --target", allow_abbrev=False)
    add_engine_flags(engine)
    engine.set_defaults(tensor_parallel_size=None)
    asked = parse_flags(engine, flags)
    target = parse_target(args.target)
    chips = asked.tensor_parallel_size or target.num_devices or 1
    if (fault := obstacle(target, chips)) is not None:
        raise ValueError(f"--target {args.target}: {fault}")
    settings = read_settings(asked)
    sizes = size_up(settings, target, chips)
    memory, depth = sizes.memory(settings), sizes.config.num_layers
    buckets = BucketLadder(memory.buckets).buckets()
    names = [*map(name_of, longest_first(buckets)), *UPDATES]
    if wrong := [name for name in args.programs if name not in names]:
        raise ValueError(f"--programs {' '.join(wrong)}: the ladder has {' '.join(names)}")
    depths = sorted(args.layers or [depth])
    say_head()
    say(f"{sizes.name}, {depth} layers, on {chips} x {target.chip.name}: {len(names)} programs")
    question = Question(
        settings=settings, target=target, chips=chips, num_pages=memory.num_pages, names=args.programs or names,
        depths=depths,
    )  # fmt: skip
    try:
        found = costs(question, depth, lambda line: print(line, file=sys.stderr, flush=True))
    except CompilerError as error:
        raise FailedError(str(error)) from error
    whole = entries(buckets, UPDATES, found)
    room = int(target.chip.memory_gib * GIB * (GPU_POOL_SHARE if target.platform == "gpu" else 1))
    tracers = num_tracers(target.platform, cores=args.cores, pool_bytes=room, num_programs=len(buckets))
    for line in lines(whole, buckets, depth=depth, depths=depths, num_cores=args.cores, tracers=tracers):
        say(line)
    if args.output_json:
        args.output_json.write_text(json.dumps([asdict(entry) for entry in whole], indent=2) + "\n")
    return 0


def lines(
    whole: Sequence[Entry],
    buckets: Sequence[Bucket],
    *,
    depth: int,
    depths: Sequence[int],
    num_cores: int,
    tracers: int = 0,
) -> list[str]:
    """The table of CPU seconds, the sum, and the time on a machine with so many cores."""
    table = Table({"program": "<20", **dict.fromkeys(("trace", "lower", "compile", "sum"), "7.1f"), "of": "<20"})
    for entry in whole:
        if (cost := entry.cost) is not None:
            own = "itself" if entry.taken_from is None else entry.taken_from
            table.row(entry.name, cost.trace, cost.lower, cost.compile, cost.total, own)
    counted = [entry.cost for entry in whole if entry.cost is not None]
    total = NOTHING
    for cost in counted:
        total = total.plus(cost)
    table.row(f"{len(counted)} programs", total.trace, total.lower, total.compile, total.total, "")
    said = [*table.lines, ""]
    if missing := [entry.name for entry in whole if entry.cost is None]:
        said.append(f"not counted, because none of their kind was compiled: {', '.join(missing)}")
    if len(depths) == 2:
        said.append(
            f"compiled with {depths[0]} and {depths[1]} layers; {depth} layers are taken to cost more in proportion, "
            "and cost less where the compiler shares the code of equal layers"
        )
    elif depths[0] != depth:
        said.append(f"compiled with {depths[0]} layers in place of {depth}")
    said += _of_drawing(whole, buckets)
    traced, _ = traced_after(counted, tracers)
    helped = f" and {tracers} others" if tracers else ""
    said.append(
        f"on {num_cores} cores: ready after {ready_after(counted, num_cores, tracers):.0f} s, if one core compiles a "
        f"program; all are traced after {traced[-1]:.0f} s, by the engine{helped}"
    )
    return said


def _of_drawing(whole: Sequence[Entry], buckets: Sequence[Bucket]) -> list[str]:
    """What is in every program that samples: its cost is the difference between two decodes."""
    own = {entry.name: entry.cost for entry in whole if entry.cost is not None and entry.taken_from is None}
    pairs: list[tuple[str, Cost, Cost]] = []
    for bucket in buckets:
        greedy = name_of(Bucket(bucket.num_tokens, bucket.num_rows, Variant.GREEDY))
        name = name_of(bucket)
        if bucket.decode_only and bucket.variant is Variant.SAMPLE and name in own and greedy in own:
            pairs.append((name, own[name], own[greedy]))
    num_sampling = sum(bucket.variant is not Variant.GREEDY for bucket in buckets)
    return [
        f"{sampled.total - plain.total:.1f} of {name} are its sampling, which {num_sampling} programs have"
        for name, sampled, plain in pairs
    ]
