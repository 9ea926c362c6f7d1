"""Reads the compilers' report on kernels from the folder of a Mosaic dump: registers, spills and shared memory.

Set `MOSAIC_GPU_DUMP_TO` to an existing folder before compiling. Used by the compile-only tests and by the bench.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from pallas_kernels.chips import GpuChip

WARPGROUP = 128  # threads
DRIVER_BYTES = 1024  # of shared memory per CTA
REGISTERS = 65536  # of a multiprocessor, on every generation


@dataclass(frozen=True)
class Kernel:
    """A kernel of a dump, with its use of a multiprocessor's resources."""

    name: str
    file: str  # the stem of its files in the dump
    registers: int  # per thread, at launch
    spill_bytes: int
    shared_memory: int
    warpgroups: int

    def ctas(self, chip: GpuChip) -> int:
        """CTAs that one multiprocessor holds at once, by registers and by shared memory."""
        by_registers = REGISTERS // (-(-self.registers // 8) * 8 * self.warpgroups * WARPGROUP)
        return min(by_registers, chip.shared_memory.per_multiprocessor // (self.shared_memory + DRIVER_BYTES))


def kernels(folder: Path) -> list[Kernel]:
    """Every kernel of the dump, in the order of their names."""
    return [_kernel(path) for path in sorted(folder.glob("*.ptxas"))]


def _kernel(path: Path) -> Kernel:
    stem = path.with_suffix("")
    said = path.read_text()
    ptx = stem.with_suffix(".ptx").read_text()
    shared = re.search(r"smem_scratch_bytes=(\d+)", stem.with_suffix(".resources.txt").read_text())
    registers = re.search(r"Used (\d+) registers", said)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", said)
    threads = re.search(r"\.(?:reqntid|maxntid) (\d+)", ptx)
    if shared is None or registers is None or threads is None or not spills:
        raise ValueError(f"not the dump of a kernel: {path=}")
    return Kernel(
        name=re.sub(r"_\d+$", "", stem.name),
        file=stem.name,
        registers=int(registers[1]),
        spill_bytes=sum(int(spill) for spill in spills),
        shared_memory=int(shared[1]),
        warpgroups=int(threads[1]) // WARPGROUP,
    )
