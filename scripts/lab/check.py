"""First contact with a chip: are its numbers right, and what does it deliver of its memory's and its products' speed?

    scripts/check                          all parts, in under ten minutes; writes check-<chip>-<date>.md and .json
    scripts/check --resume                 only the parts that have no result yet
    scripts/check --parts kernels,text     only these
    scripts/check --rehearse               all parts to the end on a CPU: interpreted kernels, tiny shapes, no figures
    scripts/check --make-kit kit.tgz       packs the tree and the packages for a machine that has jax and flax only

Each part runs in a process of its own with a time limit, so a crash or a hang of one is a line in the report. The exit
code is 1 if a number was wrong or a part did not finish.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from model.inputs.paths import local_path
from scripts.building.device import find_device
from scripts.flags.errors import FailedError, add_debug_flag, run_command
from scripts.flags.settings import DEVICES
from scripts.lab.chip.kit import make_kit
from scripts.lab.chip.parts import DEFAULT_MODELS, PARTS, Options
from scripts.lab.chip.progress import Progress, write_report


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    p = argparse.ArgumentParser(
        prog="scripts/check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "--parts", type=_parts, default=tuple(PARTS), metavar="A,B", help=f"of {', '.join(PARTS)} (default: all)"
    )
    p.add_argument("--resume", action="store_true", help="keep the results of parts that have finished")
    p.add_argument("--device", default="auto", choices=DEVICES)
    p.add_argument(
        "--model", action="append", metavar="PRESET", help=f"may be given again (default: {', '.join(DEFAULT_MODELS)})"
    )
    p.add_argument("--limit", type=float, default=600.0, metavar="S", help="seconds for all parts (default: 600)")
    p.add_argument("--state", type=local_path, metavar="DIR", help="results of parts (default: a folder in --output)")
    p.add_argument("--output", type=local_path, default=Path(), metavar="DIR", help="where the report is written")
    p.add_argument("--rehearse", action="store_true", help="on a CPU, with interpreted kernels and tiny shapes")
    p.add_argument("--seed", type=int, help="of the random batches (default: random; it is in the report)")
    p.add_argument("--make-kit", type=local_path, metavar="FILE", help="pack a kit, and check nothing")
    p.add_argument("--kit-python", metavar="3.N", help="of the kit (default: this Python's version)")
    add_debug_flag(p)
    return p


def _parts(text: str) -> tuple[str, ...]:
    asked = text.split(",")
    unknown = sorted(set(asked) - set(PARTS))
    if unknown:
        raise argparse.ArgumentTypeError(f"there are {', '.join(PARTS)}, not {', '.join(unknown)}")
    return tuple(part for part in PARTS if part in asked)


def check(args: argparse.Namespace) -> int:
    """Runs the parts, writes the report, and returns the exit code."""
    if args.make_kit is not None:
        print(make_kit(args.make_kit, args.kit_python))
        return 0
    device = "cpu" if args.rehearse else find_device() if args.device == "auto" else args.device
    if device == "cpu" and not args.rehearse:
        raise ValueError("no GPU or TPU was found: --rehearse runs every part on a CPU; --device names a device")
    options = Options.make(
        device=device, rehearse=args.rehearse, models=tuple(args.model or ()), seed=args.seed, limit_s=args.limit
    )
    progress = Progress(args.state or args.output / "check-state", options)
    if not args.resume:
        progress.forget(args.parts)
    results = progress.run(args.parts)
    paths = write_report(args.output, options, results)
    print(f"the report: {', '.join(map(str, paths))}")
    bad = [name for name, result in results.items() if result.is_bad]
    if bad:
        raise FailedError(f"not in order: {', '.join(bad)} (see the report)")
    return 0


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    args = parser().parse_args(argv)
    return run_command("scripts/check", lambda: check(args), debug=args.debug)
