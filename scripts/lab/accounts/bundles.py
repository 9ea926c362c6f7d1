"""Reads the TPU compiler's dumps of a kernel: the loops of its final VLIW bundles, and its VMEM."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

# `  0x1c LB: > { ...`: address, label, nesting depth, instructions. LB begins a loop's body.
_BUNDLE = re.compile(r"^\s*(0x[0-9a-f]+|0)\s+(LH|LB|LE|PB|PF|CT|OH|OB)?\s*:\s*(>*)\s*\{(.*)")


@dataclass
class Loop:
    """A loop of a TPU program. A bundle is a set of instructions that are issued together."""

    depth: int
    begin: int  # index of its first bundle
    bundles: int = 0  # including those of inner loops, each counted once
    matmuls: int = 0
    copies: int = 0  # DMAs started
    spills: int = 0
    arithmetic: int = 0  # vector instructions, without loads and stores

    @property
    def moves(self) -> bool:
        """Whether it copies between two places of VMEM: XLA keeps some of the operands there, which is up to it."""
        return not (self.arithmetic or self.matmuls or self.copies)

    def inside(self, other: Loop) -> bool:
        """Whether this loop runs within `other`."""
        return self.depth > other.depth and other.begin <= self.begin < other.begin + other.bundles


@dataclass(frozen=True)
class Vmem:
    """Bytes of a kernel's scoped VMEM."""

    capacity: int  # of the chip
    used: int  # spill slots included
    spilled: int  # slots for vector registers


def dump_flags(folder: str) -> str:
    """The value of LIBTPU_INIT_ARGS, set before libtpu loads, for the dumps read here."""
    return f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final_bundles"


def bundle_dumps(folder: Path, kernel: str) -> list[Path]:
    """The files in `folder` that list the final bundles of `kernel`."""
    return [path for path in sorted(folder.glob(f"*{kernel}*final_bundles.txt")) if "schedule" not in path.name]


def read_vmem(folder: Path) -> dict[str, Vmem]:
    """The VMEM of each operation, by name, from the compiler's latest report in `folder`."""
    text = max(folder.glob("*vmem_report.html"), key=lambda path: path.name).read_text()
    begin = re.search(r"const DATA =\s*", text)
    assert begin is not None
    report, _ = json.JSONDecoder().raw_decode(text, begin.end())
    return {
        name: Vmem(
            capacity=report["global_info"]["vmem_capacity"],
            used=operation["total_size"],
            spilled=sum(
                allocation["size"]
                for block in operation["blocks"]
                for allocation in block["allocations"]
                if allocation.get("tag") == "SPILL"
            ),
        )
        for name, operation in report["hlo_breakdowns"].items()
    }


def read_loops(path: Path) -> list[Loop]:
    """The loops of a dump of bundles, in the order in which they begin."""
    loops: list[Loop] = []
    latest: dict[int, Loop] = {}  # by depth
    index, depth = -1, 0
    for line in path.read_text(errors="replace").splitlines():
        match = _BUNDLE.match(line)
        if match is None:
            continue
        index += 1
        label, text = match[2], match[4]
        if match[3] or not text.startswith("}"):  # an empty bundle is printed without its depth
            depth = len(match[3])
        if label == "LB":
            latest = {at: loop for at, loop in latest.items() if at < depth}
            latest[depth] = Loop(depth=depth, begin=index)
            loops.append(latest[depth])
        # Bundles of a loop's exit are printed inside the loop, but with the depth outside it.
        for loop in (loop for at, loop in latest.items() if at <= depth):
            loop.bundles += 1
            loop.matmuls += len(re.findall(r"vmatmul\.", text))
            loop.copies += len(re.findall(r"= dma\.|\} dma\.|dma\.hbm_to_vmem|dma\.vmem_to_hbm", text))
            loop.spills += text.count("_spill")
            loop.arithmetic += len(re.findall(r"= v(?!ld|st)[a-z]", text))
    return loops
