"""Chips that are not attached, as the devices of a process that traces or compiles programs for them.

libtpu describes TPUs by the name of a topology. XLA compiles for GPUs with the CUDA plug-in, without a driver. The
description of a GPU is made from the chip's figures, or is what XLA itself has said of an attached one: a start leaves
it in the folder of programs, and `scripts/check` in `topologies/`.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from model.compiling.kept_files import KeptFiles
from model.inputs.paths import Place
from pallas_kernels.chips import GPUS, TPUS, GpuChip, TpuChip

if TYPE_CHECKING:
    import jax

# libtpu asks no metadata server, and may be loaded by several processes. JAX sets libtpu's options and its own as on a
# TPU VM: a program is looked up by them, too.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "JAX_FORCE_TPU_INIT": "1",
}


@dataclass(frozen=True, kw_only=True)
class TpuTopology:
    """Connected chips of one generation on one host."""

    name: str  # the topology's name in libtpu
    chip: TpuChip
    bounds: tuple[int, ...]

    backend: ClassVar = "tpu"
    environment: ClassVar = ENVIRONMENT

    def devices(self) -> list[jax.Device]:
        """Descriptions of the chips. jax raises RuntimeError if libtpu is missing or does not know the topology."""
        from jax.experimental import topologies

        bounds = (*self.bounds, 1, 1)[:3]  # all chips on one host, as on a VM that is the whole slice
        return list(
            topologies.get_topology_desc(platform="tpu", topology_name=self.name, chips_per_host_bounds=bounds).devices
        )


def tpu_topology(name: str) -> TpuTopology:
    """The topology of a name such as v6e:1x1, v6e:2x4 or v5p:2x2x1: the generation and the chips. Raises ValueError for
    other names."""
    match = re.fullmatch(r"(\w+):(\d+(?:x\d+)+)", name)
    if match is None or match[1] not in TPUS:
        raise ValueError(f"not a TPU target: {name=}; it is one of {sorted(TPUS)} and chips, as v6e:2x4")
    bounds = tuple(int(n) for n in match[2].split("x"))
    if math.prod(bounds) < 1 or len(bounds) > 3:
        raise ValueError(f"not a TPU topology: {name=}")
    return TpuTopology(name=name, chip=TPUS[match[1]], bounds=bounds)


def attached_topology() -> str:
    """The name of all chips of this host, on which jax runs."""
    import jax

    from pallas_kernels.tpu.blocks import this_chip

    return name_of(this_chip(), [device.coords for device in jax.local_devices()])


def name_of(chip: str, coords: Iterable[tuple[int, int, int]]) -> str:
    """The name of all chips at these coordinates. Generations with links in three dimensions have three numbers."""
    x, y, z = (1 + max(places) - min(places) for places in zip(*coords, strict=True))
    return f"{chip}:{x}x{y}x{z}" if chip in ("v5p", "tpu7x") else f"{chip}:{x}x{y}"


FOLDER = Path(__file__).parent / "topologies"


@dataclass(frozen=True, kw_only=True)
class GpuTopology:
    """GPUs of one kind in one host."""

    chip: GpuChip
    count: int = 1
    said: bytes | None = None  # what XLA has said of attached ones; None: the chip's figures describe them

    backend: ClassVar = "cuda"
    # jax looks for CUDA's libraries only where a GPU is.
    environment: ClassVar[Mapping[str, str]] = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}

    @property
    def name(self) -> str:
        """The argument of `gpu_topology`."""
        return self.chip.name if self.count == 1 else f"{self.count}x{self.chip.name}"

    def devices(self) -> list[jax.Device]:
        """Descriptions of the chips. jax raises RuntimeError or NotImplementedError if the CUDA plug-in is missing."""
        from jax.experimental import topologies

        described = list(
            topologies.get_topology_desc(
                self.chip.name, platform="cuda", target_config=self._figures(), topology=f"1x{self.count}x1"
            ).devices
        )
        if self.said is None:
            return described
        return list(topology_of(described).deserialize(self.said)._make_compile_only_devices())

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
    saved = FOLDER / f"{name}.bin"
    return GpuTopology(
        chip=GPUS[match[2]], count=int(match[1] or 1), said=saved.read_bytes() if saved.exists() else None
    )


def attached_gpus() -> tuple[str, bytes] | None:
    """The name of all GPUs of this host, on which jax runs, and what XLA says of them. None: `chips.GPUS` has no such
    GPU."""
    import jax

    devices = jax.local_devices()
    names = [name for name, chip in GPUS.items() if chip.device_kind == devices[0].device_kind]
    if not names:
        return None
    name = names[0] if len(devices) == 1 else f"{len(devices)}x{names[0]}"
    return name, topology_of(devices).serialize()


def keep_description(folder: Place) -> None:
    """Stores what XLA says of this host's GPUs in a folder of programs, where `described_in` finds it."""
    if (found := attached_gpus()) is not None and described_in(folder, found[0]) != found[1]:
        KeptFiles(folder).write(f"topologies/{found[0]}.bin", found[1])


def described_in(folder: Place, name: str) -> bytes | None:
    """What XLA has said of these GPUs at the last start with this folder of programs; None: there was no such start."""
    return KeptFiles(folder).read(f"topologies/{name}.bin")


def topology_of(devices: list[jax.Device]) -> Any:
    """XLA's description of GPUs."""
    from jaxlib import xla_client

    return xla_client.get_topology_for_devices(devices)


_MORE_THAN_OURS = 1000  # the priority of a backend; that of an attached TPU is 300


def topology_named(name: str) -> TpuTopology | GpuTopology:
    """The chips of a target: v6e:2x4, h100, 8xh200. Raises ValueError for another name."""
    return tpu_topology(name) if ":" in name else gpu_topology(name)


def be_on(topology: TpuTopology | GpuTopology) -> None:
    """Makes described chips the devices of this process, so `jax.devices()` are descriptions. Programs can be traced
    and compiled for them, but nothing can be run or allocated. Call it before jax is imported.

    Raises:
        ValueError: the chips are on several hosts, or their compiler is missing or does not know them.
    """
    if isinstance(topology, TpuTopology) and (most := topology.chip.max_host_chips) < math.prod(topology.bounds):
        raise ValueError(
            f"--target {topology.name}: a host has at most {most} of these chips, and programs of several hosts are "
            "made by their own start"
        )
    os.environ |= topology.environment
    from jax._src import hardware_utils, xla_bridge  # private: JAX has no public API for described devices

    try:
        client: Any = topology.devices()[0].client
    except (RuntimeError, NotImplementedError) as error:
        plugin = {"tpu": "libtpu", "cuda": "the CUDA plug-in"}[topology.backend]
        raise ValueError(f"--target {topology.name}: {plugin} cannot compile for it here: {error}") from error
    type(client).serialize_with_sdy = True  # `jax.export` asks the client, and those of attached devices say so
    hardware_utils.has_visible_nvidia_gpu = lambda: topology.backend == "cuda"
    xla_bridge.register_backend_factory(topology.backend, lambda: client, priority=_MORE_THAN_OURS)


def is_described(backend: str) -> bool:
    """Whether `be_on` has made described chips the devices of this backend of jax."""
    from jax._src import xla_bridge

    registered = xla_bridge._backend_factories.get(backend)
    return registered is not None and registered.priority == _MORE_THAN_OURS
