"""How long an engine takes for new weights from a trainer in its process, and what memory it needs meanwhile.

    python -m scripts.lab weight_updates
    python -m scripts.lab weight_updates --model demo --forms float32 --updates 20

The weights are random, of 107 M parameters if no model is named, and given in float32 as `nnx.state` of the module that
serves. The first update compiles what makes the engine's form of them. `peak` is by how much the process's memory grows
at most: by the new arrays of a module next to its old ones, and on a CPU also by the form that its products read.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from model.loading.source import resolve
from model.network.llama import Llama
from scripts.flags.errors import add_debug_flag, run_command
from scripts.lab.load.mid import write_mid
from scripts.lab.tables import Table, say, say_head
from scripts.llm import LLM
from server.engine.scratch_folder import ScratchFolder
from server.flag import EachCounts

FORMS: Mapping[str, Mapping[str, Any]] = {  # the engine's settings
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "float32", "quantization": "int8"},
}
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
MIB = 1 << 20


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    p = argparse.ArgumentParser(prog="python -m scripts.lab weight_updates", description=__doc__.splitlines()[0])
    p.add_argument("--model", help="whose shapes the weights have (default: 107 M parameters)")
    p.add_argument("--forms", nargs="+", action=EachCounts, choices=FORMS, default=list(FORMS))
    p.add_argument("--updates", type=int, default=8, metavar="N", help="of each form, 2 or more (default: 8)")
    add_debug_flag(p)
    return p


def measured(work: Callable[[], None]) -> tuple[float, float]:
    """Milliseconds, and the MiB by which the process's memory grew at most."""
    CLEAR.write_text("5")  # the highest so far is forgotten
    before, since = _memory("VmRSS"), time.perf_counter()
    work()
    seconds = time.perf_counter() - since
    return 1e3 * seconds, (_memory("VmHWM") - before) / MIB


def _memory(field: str) -> int:
    """A field of this process's memory, in bytes."""
    (line,) = (line for line in STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def row(model: str, form: str, num_updates: int) -> list[Any]:
    """The cells of a form."""
    settings = {"max_model_len": 512, "max_num_seqs": 4, "num_pages": 64, "load_format": "dummy", **FORMS[form]}
    with LLM(model, device="cpu", **settings) as llm:
        config = resolve(model, weights=False).config
        given = nnx.state(Llama(config, dtype=jnp.float32, rngs=nnx.Rngs(0)))
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(given))
        first, *later = [measured(lambda: llm.update_weights(given, names="own")) for _ in range(num_updates)]
        asleep, awake = measured(llm.sleep), measured(llm.wake_up)
    times, peaks = map(np.median, zip(*later, strict=True))
    return [form, size / MIB, first[0], float(times), float(peaks), asleep[0], awake[0]]


def bench(args: argparse.Namespace) -> int:
    """Prints a line for each form. Returns the exit code."""
    if args.updates < 2:
        raise ValueError(f"--updates {args.updates} is not 2 or more")
    if not CLEAR.exists():
        raise ValueError("the memory of a process is read from /proc of Linux")
    jax.config.update("jax_platforms", "cpu")
    say_head()
    columns = {"engine": "<12", "MiB given": "6.0f", "first ms": "6.0f", "later ms": "6.0f", "peak MiB": "6.0f"}
    table = Table(columns | {"sleep ms": "6.0f", "wake up ms": "6.0f"}, say)
    with ScratchFolder() as scratch:
        if args.model is None:
            write_mid(scratch.path / "mid")
        for form in args.forms:
            table.row(*row(args.model or str(scratch.path / "mid"), form, args.updates))
    return 0


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    args = parser().parse_args(argv)
    return run_command("weight_updates", lambda: bench(args), debug=args.debug)
