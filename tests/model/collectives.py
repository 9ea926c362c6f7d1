"""What the chips exchange in a compiled program, read from its HLO."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast|ragged-all-to-all"


@dataclass(frozen=True)
class Collective:
    kind: str
    shape: tuple[int, ...]  # of one result; a collective of several arrays is listed once for each
    in_loop: bool

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def collectives(hlo: str) -> list[Collective]:
    """Of `compiled.as_text()`, those of branches that may not be taken included."""
    computations = _computations(hlo)
    looped = _reached_from_loops(computations)
    found = []
    for name, lines in computations.items():
        for line in lines:
            match = re.search(rf"= (.*?) ({KINDS})(?:-start)?\(", line)
            for shape in re.findall(r"\w+\[([\d,]*)\]", match[1]) if match else ():
                sizes = tuple(int(n) for n in shape.split(",") if n)
                found.append(Collective(match[2], sizes, in_loop=name in looped))
    return found


def _computations(hlo: str) -> dict[str, list[str]]:
    computations: dict[str, list[str]] = {}
    for line in hlo.splitlines():
        if match := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            lines = computations[match[1]] = []
        elif computations:
            lines.append(line)
    return computations


def _reached_from_loops(computations: dict[str, list[str]]) -> set[str]:
    def mentioned(lines: list[str]) -> set[str]:
        return {name for line in lines for name in re.findall(r"%?([\w.\-]+)", line)} & computations.keys()

    waiting = {
        name
        for lines in computations.values()
        for line in lines
        for name in re.findall(r"(?:body|condition)=%?([\w.\-]+)", line)
    }
    reached: set[str] = set()
    while waiting:
        reached |= waiting
        waiting = {name for loop in waiting for name in mentioned(computations[loop])} - reached
    return reached
