"""Counts what a GPU kernel's inner loops issue, from Mosaic's dump of its SASS with control codes (`.sass_ctrl`)."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

_INSTRUCTION = re.compile(r"\s+\S+:\S:\S:\S:(\d\d)\s+/\*[0-9a-f]+\*/\s+(.*)")
_LABEL = re.compile(r"(\.L_x_\d+):")
_BRANCH = re.compile(r"BRA\S*\s.*?(\.L_x_\d+)")


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A loop with tensor-core instructions in it."""

    instructions: int  # per warp and turn
    stall_cycles: int  # the compiler's fixed stalls: the least a warp needs to issue them. Waits for memory not counted
    operations: dict[str, int]

    @property
    def products(self) -> int:
        return sum(n for name, n in self.operations.items() if name in ("HMMA", "HGMMA"))


def read_loops(path: Path) -> list[Loop]:
    """The innermost loops of the kernel that multiply, in the order of the code."""
    stalls: list[int] = []
    texts: list[str] = []
    labels: dict[str, int] = {}
    for line in path.read_text().splitlines():
        if label := _LABEL.match(line.strip()):
            labels[label[1]] = len(texts)
        elif instruction := _INSTRUCTION.match(line):
            stalls.append(int(instruction[1]))
            texts.append(instruction[2])
    spans = []
    for end, text in enumerate(texts):
        branch = _BRANCH.search(text)
        if branch and labels.get(branch[1], end + 1) <= end:
            spans.append((labels[branch[1]], end + 1))
    loops = []
    for begin, end in spans:
        operations = Counter(_operation(text) for text in texts[begin:end])
        loop = Loop(instructions=end - begin, stall_cycles=sum(stalls[begin:end]), operations=dict(operations))
        inner = any(begin <= b and e <= end and (b, e) != (begin, end) and _multiplies(texts[b:e]) for b, e in spans)
        if loop.products and not inner:
            loops.append(loop)
    return loops


def _operation(text: str) -> str:
    return re.sub(r"^@!?U?P\w+\s+", "", text).split()[0].split(".")[0]


def _multiplies(texts: list[str]) -> bool:
    return any(_operation(text) in ("HMMA", "HGMMA") for text in texts)
