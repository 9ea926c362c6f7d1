"""The hardware of a plan: chips of one kind, and how they are connected."""

from __future__ import annotations

from dataclasses import dataclass

from pallas_kernels.chips import GpuChip, TpuChip


@dataclass(frozen=True)
class Link:
    """What one device sends to its neighbours, and what a collective costs however small it is."""

    bytes_per_s: float  # in one direction, over all of the device's links
    latency_s: float  # of an all-reduce


# Published bandwidths of both directions, halved. TPUs: "ICI bandwidth per chip" on Google Cloud's page of the
# generation; a device of tpu7x is half a chip. GPUs: NVLink or PCIe of NVIDIA's data sheets. Latencies are estimates:
# a few hops between TPUs, a launch of NCCL between GPUs.
LINKS = {
    "v5e": Link(200e9, 8e-6),
    "v5p": Link(600e9, 8e-6),
    "v6e": Link(400e9, 8e-6),
    "tpu7x": Link(300e9, 8e-6),
    "a100": Link(300e9, 15e-6),
    "l4": Link(32e9, 25e-6),
    "h100": Link(450e9, 15e-6),
    "h200": Link(450e9, 15e-6),
    "b200": Link(900e9, 15e-6),
    "b300": Link(900e9, 15e-6),
    "rtx5090": Link(64e9, 25e-6),
}


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
        """Of the target; None: all, or not known."""
        if self.num_devices is None or not isinstance(self.chip, TpuChip):
            return None
        return self.chip.devices_per_host(self.num_devices)

    @property
    def link(self) -> Link:
        return LINKS[self.chip.name]

    @property
    def flops_per_s(self) -> float:
        """Of one device, in bfloat16."""
        if isinstance(self.chip, TpuChip):
            return self.chip.clock_hz * self.chip.flops_per_cycle
        return self.chip.bf16_flops_per_s
