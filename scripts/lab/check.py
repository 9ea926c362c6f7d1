"""First contact with a chip: are its numbers right, and what does it deliver of its memory's and its products' speed?

    scripts/check --minutes 15             what tells most first; writes check-<chip>-<date>.md and .json
    scripts/check --resume FILE.json       what the report FILE.json of an earlier run, also elsewhere, leaves unknown
    scripts/check --parts kernels,text     only these
    scripts/check --rehearse               all parts to the end on a CPU: interpreted kernels, tiny shapes, no figures
    scripts/check --make-kit kit.tgz       packs the tree and the packages for a machine that has jax and flax only

Each part runs in a process of its own with a time limit, so a crash or a hang of one is a line in the report. The
report names what is still unknown. The exit code is 1 if a number was wrong or a part did not finish.
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
from scripts.lab.chip.progress import Progress, unknown, write_report


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    p = argparse.ArgumentParser(
        prog="scripts/check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "--parts",
        type=_parts,
        default=tuple(PARTS),
        metavar="A,B",
        help=f"of {', '.join(PARTS)} (default: all), and versions",
    )
    p.add_argument("--minutes", type=_minutes, default=10.0, metavar="N", help="for all parts (default: 10)")
    p.add_argument("--resume", type=local_path, metavar="FILE", help="the .json report of the run to go on with")
    p.add_argument("--device", default="auto", choices=DEVICES)
    p.add_argument(
        "--model", action="append", metavar="PRESET", help=f"may be given again (default: {', '.join(DEFAULT_MODELS)})"
    )
    p.add_argument(
        "--output", type=local_path, default=Path(), metavar="DIR", help="of the report, and of logs in check-state"
    )
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
    return tuple(part for part in PARTS if part in asked or part == "versions")  # a report says where it is from


def _minutes(text: str) -> float:
    minutes = float(text)
    if not 0 < minutes <= 24 * 60:
        raise argparse.ArgumentTypeError(f"{text} minutes are not between 0 and a day")
    return minutes


def check(args: argparse.Namespace) -> int:
    """Runs the parts, writes the report, and returns the exit code."""
    if args.make_kit is not None:
        print(make_kit(args.make_kit, args.kit_python))
        return 0
    device = "cpu" if args.rehearse else find_device() if args.device == "auto" else args.device
    if device == "cpu" and not args.rehearse:
        raise ValueError("no GPU or TPU was found: --rehearse runs every part on a CPU; --device names a device")
    options = Options.make(
        device=device, rehearse=args.rehearse, models=tuple(args.model or ()), seed=args.seed, limit_s=args.minutes * 60
    )
    progress = Progress(args.output / "check-state", options, args.resume)
    results = progress.run(args.parts, lambda results: write_report(args.output, options, results))
    paths = write_report(args.output, options, results)
    print("\n".join(["still unknown:", *(f"  {line}" for line in unknown(results) or ["nothing"])]))
    print(f"the report: {', '.join(map(str, paths))}")
    bad = [name for name, result in results.items() if result.is_bad]
    if bad:
        raise FailedError(f"not in order: {', '.join(bad)} (see the report)")
    return 0


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    args = parser().parse_args(argv)
    return run_command("scripts/check", lambda: check(args), debug=args.debug)
