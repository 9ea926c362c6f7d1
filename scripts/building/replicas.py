"""Divides the chips of a host among several engines. Each engine's process sees its own chips only. The first engine
compiles for all."""

from __future__ import annotations

import fcntl
import os
import subprocess
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from pallas_kernels.chips import GIB, TPUS
from scripts.building.device import host_bytes
from scripts.flags.settings import EngineSettings, ServedSettings

# Chips of one TPU process -> their arrangement, in libtpu's notation.
TPU_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}
GOOGLE, TPU7X = "0x1ae0", "0x0076"  # the PCI numbers of the vendor and the device, as in jax


def replicas_of(served: ServedSettings, number: int, shared: Path | None = None) -> list[ServedSettings]:
    """The settings of each of `number` engines.

    Args:
        shared: a folder that the engines of this start share; None: each engine compiles its own programs.

    Raises:
        ValueError: this host cannot have so many engines, or an engine of several hosts cannot do what is asked for.
    """
    if number > 1 and served.cluster is not None:
        raise ValueError("--data-parallel-size is for one host: several hosts share one model")
    if served.cluster is not None and served.engine.kv_offloading_size:
        raise ValueError("--kv-offloading-size: the pages of an engine of several hosts cannot leave the devices")
    keeps_programs = number > 1 and shared is not None and served.engine.compile_cache != "none"
    turn = shared / "compiled-by-the-first" if keeps_programs and shared is not None else None
    return [replace(served, replica=own, num_replicas=number, compile_turn=turn) for own in range(number)]


def claim_chips(
    served: ServedSettings,
    device: str,
    environment: MutableMapping[str, str] = os.environ,
    find_chips: Callable[[str], Sequence[str]] | None = None,
    pci: Path = Path("/sys/bus/pci/devices"),
) -> EngineSettings:
    """Leaves only this engine's chips visible to this process. Call it before jax is imported.

    The engines of a CPU have no chips of their own and share the machine's memory. Each gets an equal part of
    `memory_utilization`. Those of chips divide the host's memory that models take by default.

    Args:
        device: a device of `EngineSettings` other than "auto".
        find_chips: returns the numbers of all chips of a device.
        pci: the folder in which Linux lists PCI devices.

    Returns:
        The engine's settings.

    Raises:
        ValueError: there are too few chips, or they cannot be divided.
    """
    settings, number = served.engine, served.num_replicas
    if number == 1:
        return settings
    if device == "cpu":
        return replace(settings, memory_utilization=settings.memory_utilization / number)
    if settings.has_models:
        settings = replace(settings, models_host_memory=host_bytes(settings, number) / GIB)
    chips = (find_chips or chips_of_this_host)(device)
    in_chip = _devices_per_chip(pci, len(chips)) if device == "tpu" else 1
    asked = settings.tensor_parallel_size
    each = len(chips) // number if asked is None else -(-asked // in_chip)
    if each < 1 or each * number > len(chips):
        of_devices = f" of {in_chip} devices, which one engine has" if in_chip > 1 else ""
        raise ValueError(
            f"--data-parallel-size {number} with {max(each, 1)} chip(s) each: there are {len(chips)} chips{of_devices}"
        )
    own = chips[served.replica * each : (served.replica + 1) * each]
    if device == "cuda":
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(own)
        return settings
    if each not in TPU_BOUNDS:
        raise ValueError(f"a TPU process has {', '.join(map(str, TPU_BOUNDS))} chips, not {each}")
    environment["TPU_VISIBLE_CHIPS"] = ",".join(own)
    environment["TPU_CHIPS_PER_PROCESS_BOUNDS"] = TPU_BOUNDS[each]
    environment["TPU_PROCESS_BOUNDS"] = "1,1,1"
    return settings


def _devices_per_chip(pci: Path, num_chips: int) -> int:
    """The number of jax devices for each TPU that the driver lists. Called before jax is imported."""
    chip = TPUS["tpu7x"]
    is_one = any(_text(entry / "vendor") == GOOGLE and _text(entry / "device") == TPU7X for entry in pci.glob("*"))
    # No host has more chips of this kind. A longer list of the driver has devices, not chips.
    return chip.devices_per_chip if is_one and num_chips <= chip.max_host_chips else 1


def _text(file: Path) -> str:
    return file.read_text().strip() if file.is_file() else ""


def chips_of_this_host(device: str) -> list[str]:
    """The numbers of the chips that this process may use, from their drivers' lists. Raises ValueError."""
    variable = {"cuda": "CUDA_VISIBLE_DEVICES", "tpu": "TPU_VISIBLE_CHIPS"}[device]
    if allowed := os.environ.get(variable):
        return allowed.split(",")
    if device == "tpu":
        nodes = [*Path("/dev").glob("accel[0-9]*"), *Path("/dev/vfio").glob("[0-9]*")]
        return [str(number) for number in range(len(nodes))]
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    if listed.returncode:
        raise ValueError(f"nvidia-smi -L does not list the GPUs: {listed.stderr.strip() or listed.stdout.strip()}")
    return [str(number) for number, _ in enumerate(filter(None, listed.stdout.splitlines()))]


_POLL_S = 0.05  # between two checks whether the first engine has the lock


@contextmanager
def compiling_first(file: Path) -> Iterator[None]:
    """A context in which the first of the engines of one start compiles the programs, which the others then read from
    the disk.

    Its process holds a lock on the file meanwhile. The kernel releases the lock when the process ends for any reason,
    so no process waits for one that has ended.

    Args:
        file: the lock file, which all engines of the start share and no earlier start has created.
    """
    own = file.with_suffix(".new")
    with own.open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        own.rename(file)  # with its lock: the others never see the file without it
        yield


def wait_for_first(file: Path) -> None:
    """Waits until the first engine has compiled or has ended. The server ends all engines if one cannot start."""
    while not file.exists():
        time.sleep(_POLL_S)
    with file.open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
