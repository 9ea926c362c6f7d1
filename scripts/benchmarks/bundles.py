"""Reads the loops out of the TPU compiler's dump of final VLIW bundles."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

# `  0x1c LB: > { ...`: address, label, nesting depth, instructions. LB begins a loop's body.
_BUNDLE = re.compile(r"^\s*(0x[0-9a-f]+|0)\s+(LH|LB|LE|PB|PF|CT|OH|OB)?\s*:\s*(>*)\s*\{(.*)")


@dataclass
class Loop:
    depth: int
    begin: int  # index of its first bundle
    bundles: int = 0  # inner loops' included, each counted once
    matmuls: int = 0
    copies: int = 0  # DMAs started
    spills: int = 0


def read_loops(path: Path) -> list[Loop]:
    loops: list[Loop] = []
    open_loops: list[Loop] = []
    index = -1
    for line in path.read_text(errors="replace").splitlines():
        match = _BUNDLE.match(line)
        if match is None:
            continue
        index += 1
        label, depth, text = match[2], len(match[3]), match[4]
        if depth == 0 and text.startswith("}"):  # an empty bundle is printed without its depth
            depth = open_loops[-1].depth if open_loops else 0
        while open_loops and open_loops[-1].depth > depth:
            open_loops.pop()
        if label == "LB":
            if open_loops and open_loops[-1].depth == depth:
                open_loops.pop()
            open_loops.append(Loop(depth=depth, begin=index))
            loops.append(open_loops[-1])
        for loop in open_loops:
            loop.bundles += 1
            loop.matmuls += len(re.findall(r"vmatmul\.", text))
            loop.copies += len(re.findall(r"= dma\.|\} dma\.|dma\.hbm_to_vmem|dma\.vmem_to_hbm", text))
            loop.spills += text.count("_spill")
    return loops
