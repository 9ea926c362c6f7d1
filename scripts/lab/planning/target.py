"""The hardware of a plan: chips of one kind, and how they are connected."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from pallas_kernels.chips import GPUS, TPUS, GpuChip, TpuChip
from scripts.building.step_times import LINKS, Link, flops_per_s

CHIPS: dict[str, TpuChip | GpuChip] = {**TPUS, **GPUS}


# Bytes per second from the host's memory to a device. GPUs: PCIe of NVIDIA's data sheets, both directions halved. TPUs:
# Google's pages do not say it, and "How to Scale Your Model" calculates with this.
HOST_LINKS = {"a100": 32e9, "l4": 32e9, "h100": 64e9, "h200": 64e9, "b200": 64e9, "b300": 64e9, "rtx5090": 64e9}
TPU_HOST_LINK = 15e9


@dataclass(frozen=True, kw_only=True)
class Target:
    """Devices as jax counts them."""

    name: str  # as it was asked for, in lower case
    chip: TpuChip | GpuChip
    num_devices: int | None  # None: as many as one replica takes

    @property
    def platform(self) -> str:
        """tpu or gpu."""
        return "tpu" if isinstance(self.chip, TpuChip) else "gpu"

    @property
    def devices_per_process(self) -> int:
        """At least: what a process has, it has by whole chips."""
        return self.chip.devices_per_chip if isinstance(self.chip, TpuChip) else 1

    @property
    def devices_per_host(self) -> int | None:
        """The target's devices in one host; None: all, or not known."""
        if self.num_devices is None or not isinstance(self.chip, TpuChip):
            return None
        return self.chip.devices_per_host(self.num_devices)

    @property
    def link(self) -> Link:
        return LINKS[self.chip.name]

    @property
    def host_bytes_per_s(self) -> float:
        """The bandwidth of a device to the host's memory, in one direction."""
        return HOST_LINKS.get(self.chip.name, TPU_HOST_LINK)

    @property
    def flops_per_s(self) -> float:
        """The floating-point operations per second of one device, in bfloat16."""
        return flops_per_s(self.chip)


def parse_target(text: str) -> Target:
    """`v6e:2x4`, `8xh100`, or a chip alone, such as `l4`, in any case. Raises ValueError for anything else."""
    lower = text.lower()
    tpu = re.fullmatch(r"(\w+):(\d+(?:x\d+){1,2})", lower)
    gpu = re.fullmatch(r"(\d+)x(\w+)", lower)
    if tpu and tpu[1] in TPUS:
        name = tpu[1]
        num_devices = math.prod(map(int, tpu[2].split("x"))) * TPUS[name].devices_per_chip
    elif gpu and gpu[2] in GPUS:
        name, num_devices = gpu[2], int(gpu[1])
    elif lower in CHIPS:
        return Target(name=lower, chip=CHIPS[lower], num_devices=None)
    else:
        num_devices = 0
    if not num_devices:
        raise ValueError(
            f"--target {text}: it is a TPU and its topology (v6e:2x4; {', '.join(TPUS)}), GPUs (8xh100; "
            f"{', '.join(GPUS)}), or one of these names alone"
        )
    return Target(name=lower, chip=CHIPS[name], num_devices=num_devices)
