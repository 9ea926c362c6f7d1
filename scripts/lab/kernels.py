"""Benchmarks of the attention kernels, one kernel at a time.

    python -m scripts.lab kernels --target v6e:1x1 --static      by the compiler's account, without the chip

The measurements of a family of chips are in its own module: `lab.kernels_tpu`, `lab.kernels_gpu`.
"""

from __future__ import annotations

import argparse
import importlib

from pallas_kernels.chips import TPUS


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code. Its measurements depend on the family of the target's chip."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="a chip: v6e:1x1, ... for TPUs; h100, ... for GPUs")
    parser.add_argument("--static", action="store_true", help="compile only, and count; needs no chip")
    args, rest = parser.parse_known_args(argv)
    family = "tpu" if args.target.split(":")[0] in TPUS else "gpu"
    importlib.import_module(f"scripts.lab.kernels_{family}").measure(args.target, args.static, rest)
    return 0
