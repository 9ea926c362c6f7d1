"""The chips that kernels are tuned, planned and compiled for: one table for TPUs, one for GPUs.

A chip has one spelling everywhere: the key of its table. A TPU's is what libtpu's topologies are named by (`v6e`,
`tpu7x`), a GPU's is NVIDIA's product name in lower case (`h100`).

Figures are per device as jax counts devices: a `tpu7x` chip is two devices, a `v5p` chip is one. This module imports
nothing, so that a table can be read before jax is.
"""

from __future__ import annotations

from dataclasses import dataclass

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True, kw_only=True)
class TpuChip:
    """One generation of TPUs."""

    name: str
    memory_gib: float  # Google Cloud's page of the generation ("HBM capacity"), which says GB and means GiB
    memory_bytes_per_s: float  # the same page ("HBM bandwidth")
    clock_hz: float  # published nowhere: the published peak FLOP/s divided by `flops_per_cycle`
    flops_per_cycle: int  # bf16, of all the device's matrix units
    vmem_bytes: int  # of one core, in jax's `TpuInfo`
    # Tokens. Starting the copy of a page takes some 30 bundles at any page size. These are the smallest pages with
    # which a decode of one KV head, where a page is least, takes fewer bundles than its bytes take cycles; the fastest
    # memories (v5p, tpu7x) only come near to that, with the largest. Smaller pages waste less behind a sequence's end
    # and share more prefixes. The counts are in scripts/benchmarks/results/2026-11-21-tpu-static.md.
    page_size: int
    # Weights in fp8 are widened inside a product at the memory's speed. Others convert fp8 slowly, and int8 quickly:
    # the compilers' accounts are in scripts/benchmarks/results/decisions.md.
    reads_fp8: bool = False

    @property
    def memory_bytes_per_cycle(self) -> float:
        return self.memory_bytes_per_s / self.clock_hz


TPUS = {
    chip.name: chip
    for chip in (
        TpuChip(
            name="v5e",
            memory_gib=16,
            memory_bytes_per_s=819e9,
            clock_hz=1.5e9,
            flops_per_cycle=131072,
            vmem_bytes=128 * MIB,
            page_size=64,
        ),
        TpuChip(
            name="v5p",
            memory_gib=95,
            memory_bytes_per_s=2765e9,
            clock_hz=1.75e9,
            flops_per_cycle=262144,
            vmem_bytes=64 * MIB,
            page_size=256,
        ),
        TpuChip(
            name="v6e",
            memory_gib=32,
            memory_bytes_per_s=1638e9,
            clock_hz=1.75e9,
            flops_per_cycle=524288,
            vmem_bytes=128 * MIB,
            page_size=128,
        ),
        TpuChip(
            name="tpu7x",
            memory_gib=96,
            memory_bytes_per_s=3690e9,
            clock_hz=2.2e9,
            flops_per_cycle=524288,
            vmem_bytes=64 * MIB,
            page_size=256,
            reads_fp8=True,
        ),
    )
}


def tpu_name(chip_version: str) -> str:
    """The spelling of a generation that jax's `TpuInfo.chip_version` names: jax leaves out `tpu` (`7x`, but `v6e`)."""
    return chip_version if chip_version.startswith("v") else f"tpu{chip_version}"


@dataclass(frozen=True, kw_only=True)
class SharedMemory:
    """Bytes. A resident CTA costs 1 KiB more than it asks for, which the driver reserves."""

    per_cta: int
    per_multiprocessor: int


# By compute capability: CUDA C++ programming guide, table of technical specifications.
SHARED_MEMORY = {
    (8, 0): SharedMemory(per_cta=163 * KIB, per_multiprocessor=164 * KIB),
    (8, 6): SharedMemory(per_cta=99 * KIB, per_multiprocessor=100 * KIB),
    (8, 9): SharedMemory(per_cta=99 * KIB, per_multiprocessor=100 * KIB),
    (9, 0): SharedMemory(per_cta=227 * KIB, per_multiprocessor=228 * KIB),
    (10, 0): SharedMemory(per_cta=227 * KIB, per_multiprocessor=228 * KIB),
    (10, 3): SharedMemory(per_cta=227 * KIB, per_multiprocessor=228 * KIB),
    (12, 0): SharedMemory(per_cta=99 * KIB, per_multiprocessor=100 * KIB),
}


def arch_reads_fp8(arch: tuple[int, int]) -> bool:
    """Whether weights in fp8 are widened inside a product. Below Hopper a wide copy of them is written every time."""
    return arch >= (9, 0)


@dataclass(frozen=True, kw_only=True)
class GpuChip:
    """One of NVIDIA's GPUs. Figures without a source of their own are those of its data sheet."""

    name: str
    device_kind: str  # as jax and the driver call it
    arch: tuple[int, int]  # compute capability
    num_multiprocessors: int
    clock_hz: float  # boost
    # What the driver reports in total: that is what jax's pool is a share of. The data sheets say GB; the driver's GiB
    # are the same number within half a percent, except where ECC takes a sixteenth of GDDR memory (L4: 22.5 of 24).
    memory_gib: float
    memory_bytes_per_s: float
    l2_bytes: int
    bf16_flops_per_s: float  # dense, without sparsity

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * GIB)

    @property
    def shared_memory(self) -> SharedMemory:
        return SHARED_MEMORY[self.arch]

    @property
    def reads_fp8(self) -> bool:
        return arch_reads_fp8(self.arch)


GPUS = {
    chip.name: chip
    for chip in (
        GpuChip(
            name="a100",
            device_kind="NVIDIA A100-SXM4-80GB",
            arch=(8, 0),
            num_multiprocessors=108,
            clock_hz=1.41e9,
            memory_gib=80,
            memory_bytes_per_s=2039e9,
            l2_bytes=40 * MIB,
            bf16_flops_per_s=312e12,
        ),
        GpuChip(
            name="l4",
            device_kind="NVIDIA L4",
            arch=(8, 9),
            num_multiprocessors=58,
            clock_hz=2.04e9,
            memory_gib=22.5,
            memory_bytes_per_s=300e9,
            l2_bytes=48 * MIB,
            bf16_flops_per_s=121e12,
        ),
        GpuChip(
            name="h100",
            device_kind="NVIDIA H100 80GB HBM3",
            arch=(9, 0),
            num_multiprocessors=132,
            clock_hz=1.98e9,
            memory_gib=80,
            memory_bytes_per_s=3350e9,
            l2_bytes=50 * MIB,
            bf16_flops_per_s=989e12,
        ),
        GpuChip(
            name="h200",
            device_kind="NVIDIA H200",
            arch=(9, 0),
            num_multiprocessors=132,
            clock_hz=1.98e9,
            memory_gib=141,
            memory_bytes_per_s=4800e9,
            l2_bytes=50 * MIB,
            bf16_flops_per_s=989e12,
        ),
        GpuChip(
            name="b200",
            device_kind="NVIDIA B200",
            arch=(10, 0),
            num_multiprocessors=148,
            clock_hz=1.965e9,
            memory_gib=180,
            memory_bytes_per_s=8000e9,
            l2_bytes=126 * MIB,
            bf16_flops_per_s=2250e12,
        ),
        GpuChip(
            name="b300",
            device_kind="NVIDIA B300",
            arch=(10, 3),
            num_multiprocessors=148,
            clock_hz=1.965e9,
            memory_gib=270,
            memory_bytes_per_s=8000e9,
            l2_bytes=126 * MIB,
            bf16_flops_per_s=2250e12,
        ),
        GpuChip(
            name="rtx5090",
            device_kind="NVIDIA GeForce RTX 5090",
            arch=(12, 0),
            num_multiprocessors=170,
            clock_hz=2.41e9,
            memory_gib=32,
            memory_bytes_per_s=1792e9,
            l2_bytes=96 * MIB,
            bf16_flops_per_s=209e12,
        ),
    )
}
