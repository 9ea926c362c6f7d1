"""What is here: versions, driver, memory, clocks."""

from __future__ import annotations

import os
import platform
import subprocess

from pallas_kernels.chips import GPUS
from scripts.building.device import start_jax
from scripts.flags.settings import EngineSettings
from scripts.lab.chip.parts import ROOT, Options, Result
from scripts.lab.tables import versions

PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt", "libtpu", "flax", "numpy")
NVIDIA = (
    "name", "driver_version", "memory.total", "clocks.sm", "clocks.max.sm", "clocks.mem", "clocks.max.mem",
    "power.limit", "temperature.gpu", "ecc.mode.current", "mig.mode.current",
)  # fmt: skip
COMMIT = ROOT / "kit" / "commit"


def run(options: Options, result: Result) -> None:
    """Fills the result."""
    import jax

    from model.execution.device_memory import device_memory

    start_jax(EngineSettings(device=options.device))
    device = jax.devices()[0]
    result.figures |= {
        "device": device.device_kind,
        "devices": jax.device_count(),
        "memory_bytes": device_memory(device).total,
        "runtime": device.client.platform_version,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "commit": _commit(),
        "packages": versions(PACKAGES),
        "nvidia_smi": nvidia_smi(),
    }
    for name, value in result.figures.items():
        shown = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
        result.say(f"- {name}: {' '.join(str(shown or 'not known here').split())}")
    known = {chip.device_kind for chip in GPUS.values()}
    if device.platform == "gpu" and device.device_kind not in known:
        result.say(
            f"- {device.device_kind} is not in the table of pallas_kernels/chips.py, which has no figures for it"
        )


def nvidia_smi() -> dict[str, str]:
    """What NVIDIA's tool says of the first GPU; nothing where there is none."""
    query = ["nvidia-smi", f"--query-gpu={','.join(NVIDIA)}", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(NVIDIA, map(str.strip, found.stdout.splitlines()[0].split(",")), strict=True))


def _commit() -> str | None:
    if COMMIT.exists():
        return COMMIT.read_text().strip()
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return found.stdout.strip() or None
