"""The command `python -m scripts.lab ptx`."""

from __future__ import annotations

import argparse
import os
import time

from pallas_kernels.chips import GPUS
from scripts.lab.ptx import __doc__ as summary


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    p = argparse.ArgumentParser(prog="python -m scripts.lab ptx", description=summary)
    p.add_argument("--target", required=True, choices=GPUS, help="the chip that the kernels are compiled for")
    p.add_argument("--form", choices=("decode", "prefill", "combine"), help="under all schedules (default: all)")
    p.add_argument("--shape", action="append", help="a step of cases.SHAPES; may be given again (default: all)")
    p.add_argument("--seeds", type=int, default=10, help="schedules: late and early copies, then random ones")
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
    forms = [args.form] if args.form else cases.FORMS
    failed = False
    for name in args.shape or cases.SHAPES:
        began = time.monotonic()
        found = cases.run(cases.SHAPES[name], args.target, cases.schedules(args.seeds), forms)
        failed |= bool(str(found))
        print(
            f"{name}: {'nothing found' if not str(found) else ''} ({time.monotonic() - began:.0f} s)\n{found}",
            flush=True,
        )
    return int(failed)
