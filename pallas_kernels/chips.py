"""The chips for which kernels are tuned, planned and compiled: one table for TPUs, one for GPUs.

The name of a chip is its key in the table everywhere. For a TPU it is the name of libtpu's topologies (`v6e`, `tpu7x`),
for a GPU it is NVIDIA's product name in lower case (`h100`).

Figures are per device, as jax counts devices: a `tpu7x` chip is two devices, a `v5p` chip is one. This module does not
import jax, so the tables can be read before jax is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
HOST_CHIPS = 4  # chips of each host in a TPU slice of several hosts
# The share of a GPU's memory for arrays; --memory-utilization is a share of it. CUDA's context, the loaded programs and
# NCCL's buffers have the rest (scripts/lab/results/decisions.md).
GPU_POOL_SHARE = 0.92


@dataclass(frozen=True)
class TpuChip:
    """One generation of TPUs."""

    name: str
    # The memory that a program may use, from the message of libtpu's compiler for a program that needs more. It is less
    # than the "HBM capacity" on Google Cloud's page of the generation (16, 95, 32, 96), except for the v5p.
    memory_gib: float
    memory_bytes_per_s: float  # the same page ("HBM bandwidth")
    clock_hz: float  # not published: the published peak FLOP/s divided by `flops_per_cycle`
    flops_per_cycle: int  # in bfloat16, all matrix units of the device together
    vmem_bytes: int  # bytes of one core's VMEM, from jax's `TpuInfo`
    # Tokens of a page. Starting the copy of a page takes some 30 bundles at any page size. A decode of one KV head has
    # the smallest pages. The page size is the smallest with which this decode takes fewer bundles than its copies take
    # cycles. With the fastest memories (v5p, tpu7x), even the largest pages only come close to that. Smaller pages
    # waste less at the end of a sequence and share more prefixes. The counts are in
    # scripts/lab/results/2026-11-21-tpu-static.md.
    page_size: int
    # Cores that share the device's matrix units. XLA's products use all cores. A kernel whose grid has no parallel
    # dimension, such as the attention kernels, runs on the first core: the final bundles show that the other core jumps
    # to the kernel's end.
    cores: int = 1
    # The forms of weights that a product dequantises at the memory's speed. All chips convert int8 quickly. Chips
    # without "fp8" convert it slowly (compilers' accounts: scripts/lab/results/decisions.md). A chip has "int4" if, by
    # the compiler's account, `tpu.int4_product` takes little longer than reading its weights at 16 rows, and no longer
    # than a product with int8 at 512 rows (scripts/lab/results/2026-11-23-int4.md). "nvfp4" stands where "int4" does:
    # it is exact and saves memory, but up to 64 rows it takes 1.3 times as long as reading int8 ("Weights in NVFP4" in
    # scripts/lab/results/decisions.md).
    reads: frozenset[str] = frozenset({"int8"})
    # "int8" or "fp8" -> the least number of rows for which rounding the inputs to this type pays. With that many rows,
    # the rounding and the products with rounded inputs take less time than products with inputs in bfloat16
    # (scripts/lab/results/2026-11-22-rounded-inputs.md).
    rounded_rows: Mapping[str, int] = field(default_factory=dict, hash=False)
    devices_per_chip: int = 1  # a process has all devices of its chips
    max_host_chips: int = HOST_CHIPS  # chips of the largest slice on one host

    def devices_per_host(self, num_devices: int) -> int:
        """The number of devices on each host of a slice with `num_devices` devices."""
        chips = num_devices // self.devices_per_chip
        return num_devices if chips <= self.max_host_chips else HOST_CHIPS * self.devices_per_chip


TPUS = {
    chip.name: chip
    for chip in (
        #       name     GiB    bytes/s clock  FLOP/cycle  VMEM     page
        TpuChip("v5e",   15.75,  819e9, 1.50e9, 131072, 128 * MIB,  64, rounded_rows={"int8": 1}, max_host_chips=8),
        TpuChip("v5p",   95.73, 2765e9, 1.75e9, 262144,  64 * MIB, 256, cores=2, rounded_rows={"int8": 1}),
        TpuChip("v6e",   31.24, 1638e9, 1.75e9, 524288, 128 * MIB, 128, rounded_rows={"int8": 512},
                reads=frozenset({"int8", "int4", "int4-g16", "nvfp4"}), max_host_chips=8),
        TpuChip("tpu7x", 94.74, 3690e9, 2.20e9, 524288,  64 * MIB, 256, rounded_rows={"fp8": 512},
                reads=frozenset({"int8", "fp8"}), devices_per_chip=2),
    )
}  # fmt: skip


def tpu_name(chip_version: str) -> str:
    """The table's key for jax's `TpuInfo.chip_version`. Versions without `v`, such as `7x`, lack the prefix `tpu`."""
    return chip_version if chip_version.startswith("v") else f"tpu{chip_version}"


# The rate of products of two 8-bit numbers, as a multiple of bfloat16's rate, for the types in `rounded_rows`. Source:
# data sheets.
EIGHT_BIT_SPEED = 2.0

# `reads` and `rounded_rows` for CPUs with the C code (scripts/lab/results/2026-11-23-cpu-int8.md). "int4-exact" has the
# scales of a packed checkpoint or a GGUF file as they are stored, and "int6" is GGUF's Q6_K. Inputs of int4 and int6
# kernels are rounded to int8. The C code has no product for "int4-g16", which has groups of 16 inputs, nor for "nvfp4".
CPU_READS = frozenset({"int8", "int4", "int4-exact", "int6"})
CPU_ROUNDED_ROWS: Mapping[str, int] = {"int8": 1, "int6": 1, "int4": 1}
XLA_READS = frozenset({"int8"})  # `reads` for CPUs without the C code, and for TPUs that are not in the table


@dataclass(frozen=True, kw_only=True)
class SharedMemory:
    """Sizes of shared memory in bytes. The driver reserves 1 KiB for each resident CTA besides what the CTA
    requests."""

    per_cta: int
    per_multiprocessor: int


# Compute capability -> sizes. Source: CUDA C++ programming guide, table of technical specifications.
SHARED_MEMORY = {
    (8, 0): SharedMemory(per_cta=163 * KIB, per_multiprocessor=164 * KIB),
    **dict.fromkeys([(8, 6), (8, 9), (12, 0)], SharedMemory(per_cta=99 * KIB, per_multiprocessor=100 * KIB)),
    **dict.fromkeys([(9, 0), (10, 0), (10, 3)], SharedMemory(per_cta=227 * KIB, per_multiprocessor=228 * KIB)),
}


def arch_reads(arch: tuple[int, int]) -> frozenset[str]:
    """The forms of weights that a product dequantises at the memory's speed, on GPUs of this compute capability.

    XLA's compiler dequantises int4 kernels with scales of groups inside a product on all supported architectures
    (scripts/lab/results/2026-11-23-int4.md). Below Hopper it writes fp8 weights to memory in a wider type for each
    product, so fp8 is not among the forms. "nvfp4" is an int4 kernel whose numbers are decoded on the way ("Weights
    in NVFP4" in scripts/lab/results/decisions.md).
    """
    return frozenset({"int8", "int4", "int4-g16", "nvfp4"} | ({"fp8"} if arch >= (9, 0) else set()))


def arch_rounded_rows(arch: tuple[int, int]) -> Mapping[str, int]:
    """The least number of rows for which rounding the inputs to "int8" or "fp8" pays, on GPUs of this compute
    capability.

    By data sheets, 8-bit numbers are multiplied at twice bfloat16's rate. With fewer rows, a product takes as long as
    reading its weights, and the rounding costs launches. Ada has no other fast form of fp8. Blackwell's rates for int8
    differ between chips, so "int8" is left out.
    """
    if arch >= (10, 0):
        return {"fp8": 256}
    if arch >= (9, 0):
        return {"fp8": 256, "int8": 256}
    return {"fp8": 1, "int8": 256} if arch == (8, 9) else {"int8": 256}


def arch_converts_fp8(arch: tuple[int, int]) -> bool:
    """Whether GPUs of this compute capability have an instruction that converts fp8 (e4m3) to float16."""
    return arch >= (8, 9)


@dataclass(frozen=True)
class GpuChip:
    """A GPU of NVIDIA. Figures without another source are from its data sheet."""

    name: str
    device_kind: str  # its name in jax and the driver
    arch: tuple[int, int]  # compute capability
    num_multiprocessors: int
    clock_hz: float  # boost clock
    # The driver's total memory; jax's pool is a share of it. The number of GB in the data sheet equals the driver's
    # number of GiB within half a percent, except where ECC takes a sixteenth of GDDR memory (A10, L4: 22.5 of 24).
    memory_gib: float
    memory_bytes_per_s: float
    l2_bytes: int
    bf16_flops_per_s: float  # dense, without sparsity

    @property
    def memory_bytes(self) -> int:
        """The memory in bytes."""
        return int(self.memory_gib * GIB)

    @property
    def shared_memory(self) -> SharedMemory:
        """The sizes of shared memory for its compute capability."""
        return SHARED_MEMORY[self.arch]

    @property
    def reads(self) -> frozenset[str]:
        """The forms of weights that a product dequantises at the memory's speed."""
        return arch_reads(self.arch)

    @property
    def rounded_rows(self) -> Mapping[str, int]:
        """The least number of rows for which rounding the inputs to "int8" or "fp8" pays."""
        return arch_rounded_rows(self.arch)


GPUS = {
    chip.name: chip
    for chip in (
        #        name      device kind                 arch    SMs  clock    GiB   bytes/s  L2        bf16 FLOP/s
        GpuChip("a100",    "NVIDIA A100-SXM4-80GB",    (8, 0), 108, 1.410e9,  80.0, 2039e9,  40 * MIB,  312e12),
        GpuChip("a10",     "NVIDIA A10",               (8, 6),  72, 1.695e9,  22.5,  600e9,   6 * MIB,  125e12),
        GpuChip("l4",      "NVIDIA L4",                (8, 9),  58, 2.040e9,  22.5,  300e9,  48 * MIB,  121e12),
        GpuChip("h100",    "NVIDIA H100 80GB HBM3",    (9, 0), 132, 1.980e9,  80.0, 3350e9,  50 * MIB,  989e12),
        GpuChip("h200",    "NVIDIA H200",              (9, 0), 132, 1.980e9, 141.0, 4800e9,  50 * MIB,  989e12),
        GpuChip("b200",    "NVIDIA B200",             (10, 0), 148, 1.965e9, 180.0, 8000e9, 126 * MIB, 2250e12),
        GpuChip("b300",    "NVIDIA B300",             (10, 3), 148, 1.965e9, 270.0, 8000e9, 126 * MIB, 2250e12),
        GpuChip("rtx5090", "NVIDIA GeForce RTX 5090", (12, 0), 170, 2.410e9,  32.0, 1792e9,  96 * MIB,  209e12),
    )
}  # fmt: skip
