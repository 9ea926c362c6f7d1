"""Programs that are made without the chip (`scripts.precompile`), and a server on the chip that starts with them."""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import jax

from model.inputs.paths import write_whole
from scripts.building import described_chips
from scripts.building.child import in_child
from scripts.building.described_chips import attached_gpus, attached_topology
from scripts.building.device import start_jax
from scripts.building.precompiled import CHOICES
from scripts.flags.errors import FailedError
from scripts.flags.settings import EngineSettings
from scripts.lab.chip.parts import ROOT, Options, Result
from scripts.lab.chip.text import small_server
from scripts.lab.load.servers import READY, launched

LIMIT_S = 60.0  # until the chip has said what it is
FOUND = re.compile(
    r"compiled (\d+) programs .*\((\d+) came from the disk(?:.*?, (\d+) were traced before)?"
    r"(?:, (\d+) more were exported before)?"
)
REMARK = re.compile(r"^  precompiled +(.*)")


def run(options: Options, result: Result) -> None:
    """Fills the result. It is wrong if the server makes again what was made: executables, on GPUs traced programs. What
    this start has timed on a GPU is then enough to compile the programs without it, for another start."""
    if options.device == "cpu":
        result.say("Not checked: programs are made elsewhere for chips only.")
        return
    target = in_child(attached_target, options.device, limit_s=LIMIT_S)
    if (saved := described_chips.FOLDER / f"{target}.bin").exists():
        result.figures["topology"] = base64.b64encode(saved.read_bytes()).decode()
        result.say(f"XLA's description of {target} is in {saved.relative_to(ROOT)}: the repository keeps it.")
    limits, _ = small_server(rehearse=True)
    is_gpu = options.device == "cuda"
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as other:
        _made_and_found(cache, limits, target, result, options.device, only_traced=is_gpu)
        if is_gpu:
            for part in (CHOICES, "topologies"):
                shutil.copytree(Path(cache) / part, Path(other) / part)
            _made_and_found(other, limits, target, result, options.device, only_traced=False)


def _made_and_found(
    cache: str, limits: list[str], target: str, result: Result, device: str, *, only_traced: bool
) -> None:
    flags = [*limits, "--tensor-parallel-size", "1", "--compile-cache", cache]
    command = [sys.executable, "-m", "scripts.precompile", "--target", target, *flags]
    subprocess.run(command, cwd=ROOT, check=True)
    with launched("--device", device, "--log-level", "debug", *flags) as server:
        assert server.stdout is not None
        read(server.stdout, target, result, only_traced=only_traced)


def read(lines: Iterable[str], target: str, result: Result, *, only_traced: bool = False) -> None:
    """Reads a start's lines until it is ready. `only_traced`: the programs were traced, and are compiled here. Raises
    FailedError if it ends before."""
    needed = found = 0
    for line in lines:
        print(line, end="", flush=True)
        if (remark := REMARK.match(line)) is not None:
            result.say(f"The start: {remark[1]}.")
        elif (counts := FOUND.search(line)) is not None:
            compiled, from_disk, traced, exported = (int(count or 0) for count in counts.groups())
            needed, found = compiled + exported, (traced if only_traced else from_disk) + exported
        elif READY.match(line):
            result.figures |= {"target": target, "needed": needed, "found": found}
            result.say(f"{found} of {needed} programs came from those that were made for {target} without the chip.")
            if found < needed or not needed:
                result.wrong(f"{needed - found} of {needed} programs that were made for {target} were made again")
            return
    raise FailedError("the server ended before it was ready")


def attached_target(device: str) -> str:
    """The chips of this host as a target of `scripts.precompile`."""
    start_jax(EngineSettings(device=device, compile_cache="none"))
    if device == "tpu":
        return attached_topology()
    if (found := attached_gpus()) is None:
        raise FailedError(f"{jax.devices()[0].device_kind} is not in the table of pallas_kernels/chips.py")
    name, said = found
    if not (saved := described_chips.FOLDER / f"{name}.bin").exists():
        saved.parent.mkdir(parents=True, exist_ok=True)
        write_whole(saved, said)
    return name
