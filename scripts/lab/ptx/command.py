"""The command `python -m scripts.lab ptx`."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from pallas_kernels.chips import GPUS
from scripts.lab.ptx import __doc__ as summary

# One chip of each compute capability.
TARGETS = tuple({chip.arch: chip.name for chip in reversed(GPUS.values())}.values())[::-1]
ALL = (*((name,) for name in TARGETS), ("h100", "--mma-only"))


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    p = argparse.ArgumentParser(prog="python -m scripts.lab ptx", description=summary)
    which = p.add_mutually_exclusive_group(required=True)
    which.add_argument("--target", choices=GPUS, help="the chip that the kernels are compiled for")
    which.add_argument("--all", action="store_true", help=f"{', '.join(map(' '.join, ALL))}: in a process each")
    p.add_argument("--mma-only", action="store_true", help="as on a Hopper chip whose kernels do without wgmma")
    p.add_argument("--form", choices=("decode", "prefill", "combine"), help="under all schedules (default: all)")
    p.add_argument("--shape", action="append", help="a step of cases.SHAPES; may be given again (default: all)")
    p.add_argument("--seeds", type=int, default=10, help="schedules: late and early copies, then random ones")
    p.add_argument("--unexecuted", action="store_true", help="also list the instructions that no lane has executed")
    return p


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code: 1 if anything is wrong."""
    p = parser()
    args = p.parse_args(argv)
    os.environ["JAX_PLATFORMS"] = "cpu"
    from scripts.lab.ptx import cases

    unknown = set(args.shape or ()) - set(cases.SHAPES)
    if unknown:
        p.error(f"--shape {sorted(unknown)[0]!r}: there are {', '.join(map(repr, cases.SHAPES))}")
    if args.seeds < 1:
        p.error("--seeds must be at least 1")
    if args.mma_only and args.target not in ("h100", "h200"):
        p.error("--mma-only: only h100 and h200 have kernels with wgmma and without")
    if args.all:
        given = [f"--seeds={args.seeds}", *(f"--shape={name}" for name in args.shape or ())]
        given += [f"--form={args.form}"] * bool(args.form) + ["--unexecuted"] * args.unexecuted
        return _run_all(given)
    forms = [args.form] if args.form else cases.FORMS
    failed = False
    for name in args.shape or cases.SHAPES:
        began = _cpu_seconds()
        ways = cases.schedules(args.seeds)
        found = cases.run(cases.SHAPES[name], args.target, ways, forms, mma_only=args.mma_only)
        failed |= bool(str(found))
        seconds = _cpu_seconds() - began
        print(f"{name}: {'nothing found' if not str(found) else ''} ({seconds:.0f} s)\n{found}".strip(), flush=True)
        for kernel in found.coverage:
            print("\n".join([f"  {kernel}", *(kernel.left_out if args.unexecuted else [])]), flush=True)
    return int(failed)


def _run_all(flags: list[str]) -> int:
    """Every target, as many at once as there are cores."""

    def run(which: tuple[str, ...]) -> int:
        command = [sys.executable, "-m", "scripts.lab", "ptx", "--target", *which, *flags]
        ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        print(f"--target {' '.join(which)}\n{ended.stdout}", flush=True)
        return ended.returncode

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        codes = list(pool.map(run, ALL))
    print(f"{_cpu_seconds():.0f} s of CPU time")
    return int(any(codes))


def _cpu_seconds() -> float:
    """Of this process, and of those that it has waited for."""
    return sum(os.times()[:4])
