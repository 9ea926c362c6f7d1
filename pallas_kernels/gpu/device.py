"""Which GPU a program is being compiled for: what the kernels choose their form and their tiles by."""

from __future__ import annotations

from dataclasses import dataclass

import jax
from jax.experimental.mosaic.gpu import utils as mosaic_utils
from jax.extend import backend as jax_backend

KIB = 1024

# Shared memory that one CTA may use, and what one multiprocessor has (CUDA C++ programming guide, table of compute
# capabilities). A CTA also costs 1 KiB that the driver reserves.
_SHARED_MEMORY = {
    (8, 0): (163 * KIB, 164 * KIB),
    (8, 6): (99 * KIB, 100 * KIB),
    (8, 9): (99 * KIB, 100 * KIB),
    (9, 0): (227 * KIB, 228 * KIB),
    (10, 0): (227 * KIB, 228 * KIB),
    (10, 3): (227 * KIB, 228 * KIB),
    (12, 0): (99 * KIB, 100 * KIB),
}


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """What differs between the chips, as far as a kernel cares."""

    arch: tuple[int, int]  # compute capability
    num_multiprocessors: int

    def __post_init__(self) -> None:
        if self.arch not in _SHARED_MEMORY:
            raise ValueError(f"no kernels for this GPU: {self.arch=}; there are for {sorted(_SHARED_MEMORY)}")

    @property
    def cta_shared_memory(self) -> int:
        return _SHARED_MEMORY[self.arch][0]

    @property
    def multiprocessor_shared_memory(self) -> int:
        return _SHARED_MEMORY[self.arch][1]

    @property
    def has_tma(self) -> bool:
        """Bulk copies by the copy engine, with barriers; below Hopper every thread copies for itself (cp.async)."""
        return self.arch >= (9, 0)

    @property
    def has_wgmma(self) -> bool:
        return self.arch[0] == 9


# Few multiprocessors keep interpreted grids small; the arch is the one that the interpreter knows how to follow.
INTERPRETED = Gpu(arch=(9, 0), num_multiprocessors=4)


def current() -> Gpu:
    """The GPU that a kernel traced here and now will be lowered for; on a CPU, the one that is interpreted.

    A mesh of described devices (compiling without the chip) goes before the attached device, as in the lowering.
    """
    described = jax.sharding.get_abstract_mesh().abstract_device
    attached = jax_backend.get_default_device()
    cores = getattr(attached, "core_count", None) if described is None else described.num_cores
    if cores is None:
        return INTERPRETED
    # Private, but the only answer that agrees with the lowering by construction.
    return Gpu(arch=mosaic_utils._infer_arch(), num_multiprocessors=cores)
