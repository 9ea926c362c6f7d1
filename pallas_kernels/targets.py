"""The chips that are compiled for without being here, and what bounds them.

TPUs: libtpu compiles for any topology by name (`v6e:2x4`) on a machine without one. One process should compile for one
target; set `TPU_SKIP_MDS_QUERY=1` (no metadata server) and `JAX_PLATFORMS=cpu` before jax is imported.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import jax
from jax.experimental import topologies
from jax.sharding import Mesh


@dataclass(frozen=True, kw_only=True)
class TpuTarget:
    """Peak figures are per device as jax sees it (a tpu7x chip is two), as published or as in jax's own `TpuInfo`."""

    name: str  # as libtpu names topologies
    chips: tuple[int, ...]
    clock_hz: float  # peak FLOP/s / (FLOP per cycle of the matrix units): published nowhere, so inferred
    hbm_bytes_per_s: float
    flops_per_cycle: int  # bf16
    vmem_bytes: int

    @property
    def chip(self) -> str:
        """The generation, as jax's `TpuInfo.chip_version` and the files of `tuned/` call it."""
        return self.name.split(":")[0].removeprefix("tpu")

    @property
    def hbm_bytes_per_cycle(self) -> float:
        return self.hbm_bytes_per_s / self.clock_hz

    def devices(self) -> list[jax.Device]:
        """Raises RuntimeError (jax's) where libtpu is missing or does not know the topology."""
        bounds = (*self.chips, 1, 1)[:3]  # all chips on one host, as on a VM that is the whole slice
        return list(
            topologies.get_topology_desc(platform="tpu", topology_name=self.name, chips_per_host_bounds=bounds).devices
        )


_TPU_GENERATIONS = {
    # clock, HBM bytes/s, bf16 FLOP per cycle, VMEM bytes
    "v5e": (1.5e9, 819e9, 131072, 128 << 20),
    "v5p": (1.75e9, 2765e9, 262144, 64 << 20),
    "v6e": (1.75e9, 1638e9, 524288, 128 << 20),
    "tpu7x": (2.2e9, 3690e9, 524288, 64 << 20),
}


def tpu_target(name: str) -> TpuTarget:
    """`name`: generation and chips, such as v6e:1x1, v6e:2x4, v5p:2x2x1."""
    match = re.fullmatch(r"(\w+):(\d+(?:x\d+)+)", name)
    if match is None or match[1] not in _TPU_GENERATIONS:
        raise ValueError(f"not a TPU target: {name=}; it is one of {sorted(_TPU_GENERATIONS)} and chips, as v6e:2x4")
    clock_hz, hbm_bytes_per_s, flops_per_cycle, vmem_bytes = _TPU_GENERATIONS[match[1]]
    chips = tuple(int(n) for n in match[2].split("x"))
    if math.prod(chips) < 1 or len(chips) > 3:
        raise ValueError(f"not a TPU topology: {name=}")
    return TpuTarget(
        name=name,
        chips=chips,
        clock_hz=clock_hz,
        hbm_bytes_per_s=hbm_bytes_per_s,
        flops_per_cycle=flops_per_cycle,
        vmem_bytes=vmem_bytes,
    )


# ---- GPUs: XLA and Mosaic compile from a description of the chip, with the CUDA plug-in installed but no GPU. ----
# One process must compile for one target: the PTX version is cached at the first.


@dataclass(frozen=True, kw_only=True)
class GpuTarget:
    """Peak figures as NVIDIA publishes them (dense, without sparsity)."""

    name: str
    device_kind: str
    arch: tuple[int, int]  # compute capability
    num_multiprocessors: int
    clock_hz: float
    memory_bytes: int
    memory_bytes_per_s: float
    l2_bytes: int
    bf16_flops_per_s: float
    multiprocessor_shared_memory: int
    cta_shared_memory: int

    def devices(self, count: int = 1) -> list[jax.Device]:
        """Descriptions of `count` chips of one host. Raises RuntimeError (jax's) where the CUDA plug-in is missing."""
        shape = f"1x{count}x1" if count > 1 else "1x1x1"
        return list(
            topologies.get_topology_desc(
                self.name, platform="cuda", target_config=self._description(), topology=shape
            ).devices
        )

    @contextlib.contextmanager
    def compiling(self, mesh: Mesh) -> Iterator[None]:
        """Lowering and compiling under this context is for the target; `mesh` is of its `devices()`."""
        from jax.experimental.mosaic.gpu import core, utils

        # Private, and needed only without the chip: Mosaic takes every described device for a Hopper, and for all of
        # them has Hopper's limit of shared memory.
        infer_arch = utils._infer_arch
        utils._infer_arch = lambda: self.arch
        try:
            with (
                core.artificial_shared_memory_limit(self.cta_shared_memory),
                jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
            ):
                yield
        finally:
            utils._infer_arch = infer_arch

    def _description(self) -> str:
        """XLA's GpuTargetConfigProto. Without a driver version it keeps most calls out of CUDA graphs."""
        major, minor = self.arch
        accelerated = "feature_extension: ACCELERATED_FEATURES" if major == 12 else ""
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: {self.multiprocessor_shared_memory}
  shared_memory_per_block_optin: {self.cta_shared_memory}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  core_count: {self.num_multiprocessors} fpus_per_core: 128 clock_rate_ghz: {self.clock_hz / 1e9}
  device_memory_size: {self.memory_bytes} memory_bandwidth: {int(self.memory_bytes_per_s)}
  l2_cache_size: {self.l2_bytes}
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.8.0"
  cuda_compute_capability {{ major: {major} minor: {minor} {accelerated} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 patch: 0 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{self.device_kind}"
"""


def gpu_target(name: str) -> GpuTarget:
    """`name`: one of a100, l4, h100, h200, b200, b300, rtx5090."""
    if name not in _GPUS:
        raise ValueError(f"not a GPU target: {name=}; it is one of {sorted(_GPUS)}")
    kind, arch, cores, clock_ghz, memory_gb, gb_per_s, l2_mib, tflops = _GPUS[name]
    multiprocessor_kib, cta_kib = _GPU_SHARED_MEMORY_KIB[arch]
    return GpuTarget(
        name=name,
        device_kind=kind,
        arch=arch,
        num_multiprocessors=cores,
        clock_hz=clock_ghz * 1e9,
        memory_bytes=int(memory_gb * 1e9),
        memory_bytes_per_s=gb_per_s * 1e9,
        l2_bytes=l2_mib << 20,
        bf16_flops_per_s=tflops * 1e12,
        multiprocessor_shared_memory=multiprocessor_kib << 10,
        cta_shared_memory=cta_kib << 10,
    )


_GPUS = {
    # device, compute capability, multiprocessors, boost GHz, memory GB, GB/s, L2 MiB, bf16 TFLOP/s
    "a100": ("NVIDIA A100-SXM4-80GB", (8, 0), 108, 1.41, 80, 2039, 40, 312),
    "l4": ("NVIDIA L4", (8, 9), 58, 2.04, 23, 300, 48, 121),
    "h100": ("NVIDIA H100 80GB HBM3", (9, 0), 132, 1.98, 80, 3350, 50, 989),
    "h200": ("NVIDIA H200", (9, 0), 132, 1.98, 141, 4800, 50, 989),
    "b200": ("NVIDIA B200", (10, 0), 148, 1.965, 180, 8000, 126, 2250),
    "b300": ("NVIDIA B300", (10, 3), 148, 1.965, 270, 8000, 126, 2250),
    "rtx5090": ("NVIDIA GeForce RTX 5090", (12, 0), 170, 2.41, 32, 1792, 96, 209),
}
_GPU_SHARED_MEMORY_KIB = {  # of a multiprocessor, of one CTA (CUDA programming guide, compute capabilities)
    (8, 0): (164, 163),
    (8, 9): (100, 99),
    (9, 0): (228, 227),
    (10, 0): (228, 227),
    (10, 3): (228, 227),
    (12, 0): (100, 99),
}
