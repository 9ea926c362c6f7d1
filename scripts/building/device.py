"""The device of an engine: finds the machine's device and starts jax on it, with the folders of files that are kept
between starts.

Those files only make starts faster: a start works without them. A folder of programs holds code that the next start
runs. So a folder that other users could write to is not used, and is an error if a flag names it.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from model.compiling.compiler_options import ALLOCATOR_VARIABLE, GPU_ALLOCATOR
from model.execution.device_memory import host_memory
from model.inputs.paths import Place, check_local, place
from model.inputs.private_folders import check_private, make_folder
from model.inputs.remote import RemotePath
from pallas_kernels.chips import GIB, GPU_POOL_SHARE
from pallas_kernels.cpu import library
from scripts.building.described_chips import is_described
from scripts.flags.settings import EngineSettings

logger = logging.getLogger("pallas_serve")

HOST_LIMIT_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"  # GiB of pinned memory; XLA reads it when it starts on a GPU
XLA_HOST_LIMIT = 64  # GiB, without the variable


@dataclass(frozen=True, kw_only=True)
class KeptFolders:
    """The folders in which files are kept between starts; None: they are not kept."""

    programs: Place | None = None
    native: Path | None = None  # for C code, which is loaded from this machine only
    weights: Path | None = None  # for prepared weights


def kept_folders(settings: EngineSettings) -> KeptFolders:
    """Creates the folders of a start. The log names a folder that cannot be used.

    Raises ValueError if a flag names a folder that other users could write to.
    """
    programs = compile_cache_folder(settings.compile_cache)
    if isinstance(programs, Path) and not _is_private(programs, asked=settings.compile_cache is not None):
        programs = None
    native = None
    if programs is not None:
        native = (users_cache_folder() / "compiled" if isinstance(programs, RemotePath) else programs) / "native"
        native = native if _is_private(native, asked=False) else None
    weights = programs / "weights" if isinstance(programs, Path) else None
    return KeptFolders(programs=programs, native=native, weights=weights)


def compile_cache_folder(asked: str | None) -> Place | None:
    """The folder of compiled programs; None: they are not kept."""
    if asked == "none":
        return None
    return users_cache_folder() / "compiled" if asked is None else place(asked, "--compile-cache")


def users_cache_folder() -> Path:
    """This program's folder in the user's cache folder, or in the temporary one for a user without a home."""
    base = os.environ.get("XDG_CACHE_HOME")
    if not base:
        try:
            base = str(Path.home() / ".cache")
        except RuntimeError:  # the container's user has a number and no name
            base = f"{tempfile.gettempdir()}/cache-of-{os.geteuid()}"
    check_local(base, "XDG_CACHE_HOME")
    return Path(base) / "pallas-serve"


def _is_private(folder: Path, *, asked: bool) -> bool:
    """Creates the folder. Returns whether it exists and other users cannot write to it.

    Raises ValueError if a flag names the folder (`asked`) and other users can write to it.
    """
    try:
        make_folder(folder)
        check_private(folder, "--compile-cache")
    except (OSError, ValueError) as error:
        if asked and isinstance(error, ValueError):
            raise
        logger.warning("programs are not kept for the next start: %s", error)
        return False
    return True


PLATFORMS = {"cpu": "cpu", "cuda": "gpu", "tpu": "tpu"}  # by device, as jax names them
CUDA = 13  # the version of CUDA in jax's packages
HAS_MAPPED_MEMORY = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
ROOT = Path(__file__).parents[2]
Report = Callable[[str], None]  # takes a line of the report of a start


@dataclass(frozen=True, kw_only=True)
class Device:
    """The devices of an engine, on all its hosts together."""

    platform: str  # 'cpu', 'gpu' or 'tpu'
    num_devices: int
    num_hosts: int
    folders: KeptFolders


def start_compiling(settings: EngineSettings) -> KeptFolders:
    """Creates the kept folders. Starts to compile the C code of CPUs, if an engine with these settings could use it.
    The compiler runs while jax is imported."""
    folders = kept_folders(settings)
    device = find_device() if settings.device == "auto" else settings.device
    uses_c = device == "cpu" and settings.attention_backend in ("auto", "cpu")
    if uses_c and settings.tensor_parallel_size in (None, 1) and folders.native is not None:
        library.start_compiling(folders.native)
    return folders


def started_device(
    settings: EngineSettings,
    report: Report,
    *,
    num_hosts: int = 1,
    join: Callable[[], None] | None = None,
    folders: KeptFolders | None = None,
) -> Device:
    """Creates the kept folders and starts jax. The arguments and errors are those of `start_jax`."""
    with phase("start", report) as say:
        folders = folders or kept_folders(settings)
        platform = start_jax(settings, join, num_hosts=num_hosts, folders=folders)
        import jax

        of_hosts = "" if join is None else f" of {num_hosts} hosts"
        say(f"jax on {jax.device_count()} x {jax.devices()[0].device_kind}{of_hosts}")
        return Device(platform=platform, num_devices=jax.device_count(), num_hosts=num_hosts, folders=folders)


def start_jax(
    settings: EngineSettings,
    join: Callable[[], None] | None = None,
    *,
    num_hosts: int = 1,
    folders: KeptFolders | None = None,
) -> str:
    """Starts jax on the wanted device. Returns the platform of this process: 'cpu', 'gpu' or 'tpu'.

    Raises ValueError if the wanted device is missing, or if the system is not Linux.

    Args:
        join: joins the other hosts' processes. It is called before jax looks for devices.
        folders: the result of `kept_folders`; None: it is called here.
    """
    if sys.platform != "linux":
        advice = "run it in a container or a virtual machine with Linux"  # also in scripts/setup.sh
        raise ValueError(f"pallas-serve needs Linux, and this is {sys.platform}: {advice}")
    import jax

    device = find_device() if settings.device == "auto" else settings.device
    # The pool of the allocators that have one; --memory-utilization is a share of it.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(GPU_POOL_SHARE))
    # Only the wanted platform is started: a plug-in for an absent chip fails late and with a long message.
    jax.config.update("jax_platforms", device if device == "cpu" else f"{device},cpu")
    if device == "cpu" and settings.tensor_parallel_size is not None and settings.tensor_parallel_size > num_hosts:
        jax.config.update("jax_num_cpu_devices", settings.tensor_parallel_size // num_hosts)
    if device == "cuda":
        allocator = GPU_ALLOCATOR if is_described(device) or check_cuda() else "default"
        os.environ.setdefault(ALLOCATOR_VARIABLE, allocator)
        os.environ.setdefault(HOST_LIMIT_VARIABLE, str(XLA_HOST_LIMIT + math.ceil(host_bytes(settings) / GIB)))
    if join is not None:
        join()
    try:
        platform = jax.devices()[0].platform
    except RuntimeError as error:
        raise ValueError(f"no {device} device can be used: {error}") from error
    if platform != PLATFORMS[device]:  # jax leaves out a platform whose devices it does not see
        raise ValueError(f"no {device} device can be used: jax finds only {jax.devices()[0].device_kind} here")
    folder = (folders or kept_folders(settings)).programs
    if folder is not None:
        from model.compiling.compile_cache import keep_compilations

        keep_compilations(folder)
    return platform


def host_bytes(settings: EngineSettings, num_engines: int = 1) -> int:
    """The bytes of the host's memory for models of one of `num_engines` engines that are not on a chip."""
    asked = settings.models_host_memory
    return host_memory().free // 2 // num_engines if asked is None else int(asked * GIB)


def check_cuda() -> bool:
    """Returns whether the first GPU maps memory to virtual addresses, which shares of a virtual GPU may not do. Raises
    ValueError with the reason if CUDA finds no GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ValueError(
            f"no cuda device can be used: there is no NVIDIA driver here ({error}): install one for CUDA {CUDA}, start "
            "the container with `--gpus all`, or choose --device cpu"
        ) from error
    version, count = ctypes.c_int(), ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    if version.value < CUDA * 1000:
        has = f"{version.value // 1000}.{version.value % 1000 // 10}"
        raise ValueError(
            f"no cuda device can be used: the NVIDIA driver is for CUDA {has}, and CUDA {CUDA} is needed: install "
            "driver 580 or a later one"
        )
    failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if failed or not count.value:
        reason = f"CUDA's error {failed}" if failed else "CUDA_VISIBLE_DEVICES hides all"
        raise ValueError(f"no cuda device can be used: no GPU is visible ({reason}); `nvidia-smi -L` lists GPUs")
    maps_memory = ctypes.c_int()
    driver.cuDeviceGetAttribute(ctypes.byref(maps_memory), HAS_MAPPED_MEMORY, 0)
    return bool(maps_memory.value)


def find_device() -> str:
    """This machine's device, 'cpu', 'tpu' or 'cuda', by the same rule by which scripts/serve chooses packages."""
    command = ["bash", "-c", ". scripts/setup.sh && find_device"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if found.returncode:
        raise ValueError(found.stderr.strip())
    return found.stdout.strip()


def runs_on_tpu(settings: EngineSettings) -> bool:
    """Whether the engine's device is a TPU. Does not start jax."""
    return settings.device == "tpu" or (settings.device == "auto" and find_device() == "tpu")


@contextmanager
def phase(name: str, report: Report) -> Iterator[Report]:
    """Reports the seconds of a phase, with the remarks that its body reports."""
    started = time.perf_counter()
    said: list[str] = []
    yield said.append
    report(f"  {name:<9}{time.perf_counter() - started:6.1f} s  {'; '.join(said)}")
