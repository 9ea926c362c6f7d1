"""Programs that are made without the chip (`scripts.precompile`), and a server on the chip that starts with them."""

from __future__ import annotations

import base64
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import jax

from model.inputs.paths import write_whole
from pallas_kernels.chips import GPUS
from scripts.building.child import in_child
from scripts.building.described_chips import FOLDER, attached_topology, topology_of
from scripts.building.device import start_jax
from scripts.flags.errors import FailedError
from scripts.flags.settings import EngineSettings
from scripts.lab.chip.parts import ROOT, Options, Result
from scripts.lab.chip.text import small_server
from scripts.lab.load.servers import READY, launched

LIMIT_S = 60.0  # until the chip has said what it is
FOUND = re.compile(r"compiled (\d+) programs .*\((\d+) came from the disk(?:.*, (\d+) were traced before)?")
REMARK = re.compile(r"^  precompiled +(.*)")


def run(options: Options, result: Result) -> None:
    """Fills the result. It is wrong if the server makes again what was made: executables, on GPUs traced programs."""
    if options.device == "cpu":
        result.say("Not checked: programs are made elsewhere for chips only.")
        return
    target = in_child(attached_target, options.device, limit_s=LIMIT_S)
    if (saved := FOLDER / f"{target}.bin").exists():
        result.figures["topology"] = base64.b64encode(saved.read_bytes()).decode()
        result.say(f"XLA's description of {target} is in {saved.relative_to(ROOT)}: the repository keeps it.")
    limits, _ = small_server(rehearse=True)
    with tempfile.TemporaryDirectory() as cache:
        flags = [*limits, "--tensor-parallel-size", "1", "--compile-cache", cache]
        command = [sys.executable, "-m", "scripts.precompile", "--target", target, *flags]
        subprocess.run(command, cwd=ROOT, check=True)
        with launched("--device", options.device, "--log-level", "debug", *flags) as server:
            assert server.stdout is not None
            read(server.stdout, target, result, only_traced=options.device == "cuda")


def read(lines: Iterable[str], target: str, result: Result, *, only_traced: bool = False) -> None:
    """Reads a start's lines until it is ready. `only_traced`: the programs were traced, and are compiled here. Raises
    FailedError if it ends before."""
    needed = found = 0
    for line in lines:
        print(line, end="", flush=True)
        if (remark := REMARK.match(line)) is not None:
            result.say(f"The start: {remark[1]}.")
        elif (counts := FOUND.search(line)) is not None:
            needed, found = int(counts[1]), int((counts[3] or 0) if only_traced else counts[2])
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
    kind = jax.devices()[0].device_kind
    known = next((name for name, chip in GPUS.items() if chip.device_kind == kind), None)
    if known is None:
        raise FailedError(f"{kind} is not in the table of pallas_kernels/chips.py")
    save_topology(known)
    return known


def save_topology(name: str, folder: Path = FOLDER) -> Path:
    """Stores XLA's description of the attached GPUs of this name, unless there is one. Returns its path."""
    devices = jax.local_devices()
    path = folder / f"{name if len(devices) == 1 else f'{len(devices)}x{name}'}.bin"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, topology_of(devices).serialize())
    return path
