"""The device of an engine: finds the machine's device and starts jax on it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from model.inputs.paths import Place, check_local, expanded, place
from scripts.wiring.settings import EngineSettings

PLATFORMS = ("cpu", "gpu", "tpu")
# The share of a GPU's memory for JAX's pool. --memory-utilization is a share of the pool. CUDA's context, the loaded
# programs and NCCL's buffers are outside the pool (scripts/benchmarks/results/decisions.md).
GPU_POOL_SHARE = 0.92
ROOT = Path(__file__).parents[2]


def start_jax(settings: EngineSettings, join: Callable[[], None] | None = None, *, num_hosts: int = 1) -> str:
    """'cpu', 'gpu' or 'tpu': the platform of this process. Raises ValueError if the wanted device is missing.

    Args:
        join: joins the other hosts' processes. It is called before the devices are asked for.
    """
    import jax

    device = find_device() if settings.device == "auto" else settings.device
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(GPU_POOL_SHARE))
    # Only the wanted platform is started: a plug-in for an absent chip fails late and with a long message.
    jax.config.update("jax_platforms", device if device == "cpu" else f"{device},cpu")
    if device == "cpu" and settings.tensor_parallel_size is not None and settings.tensor_parallel_size > num_hosts:
        jax.config.update("jax_num_cpu_devices", settings.tensor_parallel_size // num_hosts)
    if join is not None:
        join()
    try:
        platform = jax.devices()[0].platform
    except RuntimeError as error:
        raise ValueError(f"no {device} device can be used: {error}") from error
    if platform not in PLATFORMS:
        raise ValueError(f"jax runs on {platform!r} here; this engine runs on {', '.join(PLATFORMS)}")
    folder = compile_cache_folder(settings.compile_cache)
    if folder is not None:
        from model.compiling.compile_cache import keep_compilations

        keep_compilations(folder)
    return platform


def find_device() -> str:
    """'cpu', 'tpu' or 'cuda': this machine's device, by the rule with which scripts/serve chooses packages."""
    command = ["bash", "-c", ". scripts/setup.sh && find_device"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if found.returncode:
        raise ValueError(found.stderr.strip())
    return found.stdout.strip()


def runs_on_tpu(settings: EngineSettings) -> bool:
    """Whether the engine's device is a TPU. Does not start jax."""
    return settings.device == "tpu" or (settings.device == "auto" and find_device() == "tpu")


def compile_cache_folder(asked: str | None) -> Place | None:
    """The folder of compiled programs; None: they are not kept."""
    if asked == "none":
        return None
    return users_cache_folder() / "compiled" if asked is None else place(asked, "--compile-cache")


def native_folder(asked: str | None) -> Path | None:
    """The folder of compiled C code, which is loaded from this machine only; None: it is not kept."""
    folder = compile_cache_folder(asked)
    if folder is None:
        return None
    return (folder if isinstance(folder, Path) else users_cache_folder() / "compiled") / "native"


def users_cache_folder() -> Path:
    """This program's folder in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    check_local(base, "XDG_CACHE_HOME")
    return Path(base) / "pallas-serve"


def export_cache_folder(asked: str | None) -> Path | None:
    """The folder of executables; None: they are not kept."""
    return None if asked is None else expanded(asked, "--export-cache")
