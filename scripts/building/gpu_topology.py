"""Descriptions of GPUs that are not attached. XLA compiles for them with the CUDA plug-in, without a driver.

A description is made from the chip's figures, or is what XLA itself has said of an attached one (`save_topology`), in a
file in `topologies/`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from model.inputs.paths import write_whole
from pallas_kernels.chips import GPUS, GpuChip

if TYPE_CHECKING:
    import jax

FOLDER = Path(__file__).parent / "topologies"


@dataclass(frozen=True, kw_only=True)
class GpuTopology:
    """GPUs of one kind in one host."""

    chip: GpuChip
    count: int = 1

    backend: ClassVar = "cuda"
    # jax looks for CUDA's libraries only where a GPU is.
    environment: ClassVar[Mapping[str, str]] = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}

    @property
    def name(self) -> str:
        """The argument of `gpu_topology`."""
        return self.chip.name if self.count == 1 else f"{self.count}x{self.chip.name}"

    def check(self) -> None:
        """Raises nothing: any number of GPUs may be in one host."""

    def devices(self) -> list[jax.Device]:
        """Descriptions of the chips. jax raises RuntimeError or NotImplementedError if the CUDA plug-in is missing."""
        from jax.experimental import topologies

        described = list(
            topologies.get_topology_desc(
                self.chip.name, platform="cuda", target_config=self._figures(), topology=f"1x{self.count}x1"
            ).devices
        )
        saved = FOLDER / f"{self.name}.bin"
        if not saved.exists():
            return described
        return list(_topology_of(described).deserialize(saved.read_bytes())._make_compile_only_devices())

    def _figures(self) -> str:
        """XLA's GpuTargetConfigProto. Without a driver version XLA keeps most calls out of CUDA graphs."""
        chip, shared_memory = self.chip, self.chip.shared_memory
        major, minor = chip.arch
        accelerated = "feature_extension: ACCELERATED_FEATURES" if major == 12 else ""
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: {shared_memory.per_multiprocessor}
  shared_memory_per_block_optin: {shared_memory.per_cta}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  core_count: {chip.num_multiprocessors} fpus_per_core: 128 clock_rate_ghz: {chip.clock_hz / 1e9}
  device_memory_size: {chip.memory_bytes} memory_bandwidth: {int(chip.memory_bytes_per_s)}
  l2_cache_size: {chip.l2_bytes}
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.8.0"
  cuda_compute_capability {{ major: {major} minor: {minor} {accelerated} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 patch: 0 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{chip.device_kind}"
"""


def gpu_topology(name: str) -> GpuTopology:
    """The topology of a name such as h200 or 8xh200: a key of `chips.GPUS`, after the number of chips if there are
    several. Raises ValueError for other names."""
    match = re.fullmatch(r"(?:([1-9]\d*)x)?(\w+)", name)
    if match is None or match[2] not in GPUS:
        raise ValueError(f"not a GPU target: {name=}; it is one of {sorted(GPUS)}, or several, as 8xh200")
    return GpuTopology(chip=GPUS[match[2]], count=int(match[1] or 1))


def save_topology(folder: Path = FOLDER) -> Path | None:
    """Stores XLA's description of the attached GPUs, unless there is one. Returns its path; None: these GPUs are not in
    the table."""
    import jax

    devices = jax.local_devices()
    names = {chip.device_kind: name for name, chip in GPUS.items()}
    if (name := names.get(devices[0].device_kind)) is None:
        return None
    path = folder / f"{name if len(devices) == 1 else f'{len(devices)}x{name}'}.bin"
    if not path.exists():
        os.makedirs(folder, exist_ok=True)
        write_whole(path, _topology_of(devices).serialize())
    return path


def _topology_of(devices: list[jax.Device]) -> Any:
    from jaxlib import xla_client

    return xla_client.get_topology_for_devices(devices)
