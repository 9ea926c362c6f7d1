"""The GPU for which a program is compiled. The kernels choose their instructions and tiles by it."""

from __future__ import annotations

from dataclasses import dataclass

import jax
from jax.experimental.mosaic.gpu import utils as mosaic_utils
from jax.extend import backend as jax_backend

from pallas_kernels.chips import SHARED_MEMORY
from pallas_kernels.errors import UnavailableError


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """The properties of a chip that a kernel depends on."""

    arch: tuple[int, int]  # compute capability
    num_multiprocessors: int
    mma_only: bool = False  # use no matrix products of a whole warpgroup, although the chip has them

    def __post_init__(self) -> None:
        if self.arch not in SHARED_MEMORY:
            have = ", ".join(f"{major}.{minor}" for major, minor in sorted(SHARED_MEMORY))
            raise UnavailableError(
                f"there are no kernels for GPUs of compute capability {self.arch[0]}.{self.arch[1]}, only of {have}"
            )

    @property
    def multiprocessor_shared_memory(self) -> int:
        """The bytes of shared memory of one multiprocessor."""
        return SHARED_MEMORY[self.arch].per_multiprocessor

    @property
    def has_tma(self) -> bool:
        """Whether the copy engine makes bulk copies, with barriers. Before Hopper, the threads copy (cp.async)."""
        return self.arch >= (9, 0)

    @property
    def has_wgmma(self) -> bool:
        """Whether the kernels use matrix products of a whole warpgroup, which only Hopper has."""
        return self.arch[0] == 9 and not self.mma_only


# Few multiprocessors keep interpreted grids small. The interpreter follows this arch only.
INTERPRETED = Gpu(arch=(9, 0), num_multiprocessors=4)


def current() -> Gpu:
    """The GPU that a kernel traced now will be lowered for; on a CPU, the one that is interpreted.

    A mesh of described devices (compiling without the chip) has priority over the attached device, as in the lowering.
    """
    described = jax.sharding.get_abstract_mesh().abstract_device
    attached = jax_backend.get_default_device()
    cores = getattr(attached, "core_count", None) if described is None else described.num_cores
    if cores is None:
        return INTERPRETED
    # A private function of jax, but the only one that always agrees with the lowering.
    return Gpu(arch=mosaic_utils._infer_arch(), num_multiprocessors=cores)
