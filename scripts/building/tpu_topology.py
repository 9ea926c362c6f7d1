"""Descriptions of TPUs that are not attached, by their names."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pallas_kernels.chips import TPUS, TpuChip

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

    def check(self) -> None:
        """Raises ValueError if the chips are on several hosts."""
        if (most := self.chip.max_host_chips) < math.prod(self.bounds):
            raise ValueError(
                f"--target {self.name}: a host has at most {most} of these chips, and programs of several hosts are "
                "made by their own start"
            )

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
