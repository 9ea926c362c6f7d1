"""Targets for compilation without the chip. The chips' figures are in `pallas_kernels/chips.py`.

TPUs: libtpu compiles for any topology by name (`v6e:2x4`) on a machine without a TPU. A process should compile for one
target only. Set `TPU_SKIP_MDS_QUERY=1` (no metadata server) and `JAX_PLATFORMS=cpu` before jax is imported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from scripts.building.described_chips import GpuTopology, TpuTopology, gpu_topology, tpu_topology


@dataclass(frozen=True, kw_only=True)
class TpuTarget(TpuTopology):
    """Chips of one generation, connected."""

    platform = "tpu"

    @property
    def memory_bytes_per_cycle(self) -> float:
        """The bytes that the memory delivers per clock cycle."""
        return self.chip.memory_bytes_per_s / self.chip.clock_hz

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
class GpuTarget(GpuTopology):
    """GPUs of one kind in one host."""

    platform = "gpu"

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


def gpu_target(name: str) -> GpuTarget:
    """As `gpu_topology`."""
    return GpuTarget(**vars(gpu_topology(name)))


def target_named(name: str) -> TpuTarget | GpuTarget:
    """As `tpu_target` or `gpu_target`."""
    return tpu_target(name) if ":" in name else gpu_target(name)
