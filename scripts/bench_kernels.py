"""Benchmarks of the attention kernels, one kernel at a time.

    python -m scripts.bench_kernels --target v6e:1x1 --static      by the compiler's account, without the chip

The measurements of a family of chips are in its own module: `benchmarks.kernels_tpu`, `benchmarks.kernels_gpu`.
"""

from __future__ import annotations

import argparse
import importlib

from pallas_kernels.chips import TPUS


def main() -> None:
    """The command. Its measurements depend on the family of the target's chip."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="a chip: v6e:1x1, ... for TPUs; h100, ... for GPUs")
    parser.add_argument("--static", action="store_true", help="compile only, and count; needs no chip")
    args, rest = parser.parse_known_args()
    family = "tpu" if args.target.split(":")[0] in TPUS else "gpu"
    importlib.import_module(f"scripts.benchmarks.kernels_{family}").main(args.target, args.static, rest)


if __name__ == "__main__":
    main()
