"""Counts what XLA sets anew in the CUDA graph of each step, and times the CPU of a dispatch, without a GPU.

python -m scripts.lab dispatch
python -m scripts.lab dispatch --model llama-3.2-1b

XLA's GPU client runs on a CUDA driver that does nothing (`accounts/cuda_stand_in.py`), which is compiled here. It needs
jax's CUDA plug-in (the extra `targets`) and a C compiler. The driver's own time, and that of kernels, is not seen.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from scripts.flags.errors import FailedError, add_debug_flag, run_command
from scripts.lab.accounts.cuda_stand_in import build
from scripts.lab.chip.parts import DEFAULT_MODELS, ROOT, Options, Result
from scripts.lab.tables import say_head

ENVIRONMENT = {
    "JAX_PLATFORMS": "cuda",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # there is no cuDNN
    "XLA_FLAGS": "--xla_gpu_autotune_level=0",
}
# The plug-in would load the real runtime, which asks the driver for more. And jax looks for a GPU's files in /dev.
CODE = """
import ctypes, sys
ctypes.CDLL("libcudart.so.13")
from jax._src import hardware_utils
hardware_utils.has_visible_nvidia_gpu = lambda: True
from scripts.lab.chip.__main__ import main
main("dispatch", *sys.argv[1:])
"""


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    p = argparse.ArgumentParser(prog="python -m scripts.lab dispatch", description=__doc__.splitlines()[0])
    p.add_argument(
        "--model", action="append", metavar="PRESET", help=f"may be given again (default: {', '.join(DEFAULT_MODELS)})"
    )
    add_debug_flag(p)
    return p


def bench(models: tuple[str, ...]) -> int:
    """Builds the driver, runs the steps in a process on it, and returns the exit code."""
    options = Options.make(device="cuda", rehearse=False, models=models, seed=0, limit_s=0.0)
    with tempfile.TemporaryDirectory() as folder:
        driver, path = build(Path(folder)), Path(folder) / "dispatch.json"
        say_head("a CUDA driver that does nothing, as an H100")
        env = (
            os.environ
            | ENVIRONMENT
            | {"LD_LIBRARY_PATH": str(driver), "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": folder}
        )
        done = subprocess.run([sys.executable, "-c", CODE, options.to_json(), path], cwd=ROOT, env=env, check=False)
        result = Result.read(path) if path.exists() else Result(status="failed")
    if result.is_bad:
        raise FailedError("; ".join(result.problems) or f"the process ended with exit code {done.returncode}")
    return 0


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    args = parser().parse_args(argv)
    return run_command("dispatch", lambda: bench(tuple(args.model or ())), debug=args.debug)
