"""Targets for compilation without the chip. The chips' figures are in `pallas_kernels/chips.py`.

TPUs: libtpu compiles for any topology by name (`v6e:2x4`) on a machine without a TPU. A process should compile for one
target only. Set `TPU_SKIP_MDS_QUERY=1` (no metadata server) and `JAX_PLATFORMS=cpu` before jax is imported.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.chips import GPUS, GpuChip
from scripts.building.tpu_topology import TpuTopology, tpu_topology


@dataclass(frozen=True, kw_only=True)
class TpuTarget(TpuTopology):
    """Chips of one generation, connected."""

    platform = "tpu"

    def compiling(self, mesh: Mesh) -> contextlib.AbstractContextManager[None]:
        """Nothing: the devices of the mesh say enough."""
        return contextlib.nullcontext()

    def compile_kernel(self, call: Callable[..., Any], operands: Sequence[tuple[Any, Any]]) -> jax.stages.Compiled:
        """A kernel alone, on one chip. Errors of the compiler are raised.

        Args:
            operands: their shapes and dtypes.
        """
        mesh = Mesh(np.array(self.devices()[:1]), ("tensor",))
        everywhere = NamedSharding(mesh, P())
        # A kernel for an absent chip lowers only under shard_map: the mesh determines the chip.
        sharded = jax.shard_map(call, mesh=mesh, in_specs=(P(),) * len(operands), out_specs=P(), check_vma=False)
        abstract = [jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere) for shape, dtype in operands]
        return jax.jit(sharded).lower(*abstract).compile()


def tpu_target(name: str) -> TpuTarget:
    """As `tpu_topology`."""
    return TpuTarget(**vars(tpu_topology(name)))


# ---- GPUs: XLA and Mosaic compile from a description of the chip, with the CUDA plug-in installed but no GPU. ----
# A process must compile for one target only: the first compilation caches the PTX version.


@dataclass(frozen=True, kw_only=True)
class GpuTarget:
    """GPUs of one kind in one host."""

    chip: GpuChip
    count: int = 1

    platform = "gpu"

    def devices(self) -> list[jax.Device]:
        """Descriptions of the chips. jax raises RuntimeError if the CUDA plug-in is missing."""
        return list(
            topologies.get_topology_desc(
                self.chip.name, platform="cuda", target_config=self._description(), topology=f"1x{self.count}x1"
            ).devices
        )

    @contextlib.contextmanager
    def compiling(self, mesh: Mesh) -> Iterator[None]:
        """A context that lowers and compiles for the target. `mesh` has its `devices()`."""
        from jax.experimental.mosaic.gpu import core, utils

        # Private, and needed only without the chip: Mosaic treats every described device as a Hopper GPU, with Hopper's
        # limit of shared memory.
        infer_arch = utils._infer_arch
        utils._infer_arch = lambda: self.chip.arch
        try:
            with (
                core.artificial_shared_memory_limit(self.chip.shared_memory.per_cta),
                jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
            ):
                yield
        finally:
            utils._infer_arch = infer_arch

    def _description(self) -> str:
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


def gpu_target(name: str) -> GpuTarget:
    """`name`: a key of `chips.GPUS`, after the number of chips if they are several: h200, 8xh200."""
    match = re.fullmatch(r"(?:([1-9]\d*)x)?(\w+)", name)
    if match is None or match[2] not in GPUS:
        raise ValueError(f"not a GPU target: {name=}; it is one of {sorted(GPUS)}, or several, as 8xh200")
    return GpuTarget(chip=GPUS[match[2]], count=int(match[1] or 1))


def target_named(name: str) -> TpuTarget | GpuTarget:
    """As `tpu_target` or `gpu_target`."""
    return tpu_target(name) if ":" in name else gpu_target(name)
