"""Counts the instructions of a GPU kernel's inner loops, in Mosaic's dump of SASS with control codes (`.sass_ctrl`)."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

_INSTRUCTION = re.compile(r"\s+\S+:\S:\S:\S:(\d\d)\s+/\*[0-9a-f]+\*/\s+(.*)")
_LABEL = re.compile(r"(\.L_x_\d+):")
_BRANCH = re.compile(r"(?:(@!?U?P\w+)\s+)?BRA\S*\s.*?(\.L_x_\d+)")
_EXIT = re.compile(r"EXIT\b")
PRODUCTS = ("HMMA", "HGMMA")


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A loop with tensor-core instructions. Waiting loops inside it (spinning barriers) are not counted."""

    instructions: int  # per warp and turn
    stall_cycles: int  # the compiler's fixed stalls: a warp's least time to issue them, without memory waits
    operations: dict[str, int]


def read_loops(path: Path) -> list[Loop]:
    """The kernel's innermost loops with matrix products, in the order of the code."""
    code = _Code(path.read_text())
    loops = code.loops()
    multiplying = [body for body in loops if any(code.operation(i) in PRODUCTS for i in body)]
    found = []
    for body in multiplying:
        if any(other < body for other in multiplying):
            continue
        waiting = frozenset().union(*(other for other in loops if other < body))
        counted = sorted(body - waiting)
        found.append(
            (
                counted[0],
                Loop(
                    instructions=len(counted),
                    stall_cycles=sum(code.stalls[i] for i in counted),
                    operations=dict(Counter(code.operation(i) for i in counted)),
                ),
            )
        )
    return [loop for _, loop in sorted(found, key=lambda pair: pair[0])]


class _Code:
    """The instructions of one kernel, by index, with the possible successors of each."""

    def __init__(self, text: str) -> None:
        self.stalls: list[int] = []
        self.texts: list[str] = []
        labels: dict[str, int] = {}
        for line in text.splitlines():
            if label := _LABEL.match(line.strip()):
                labels[label[1]] = len(self.texts)
            elif instruction := _INSTRUCTION.match(line):
                self.stalls.append(int(instruction[1]))
                self.texts.append(instruction[2])
        self.next = [self._successors(i, labels) for i in range(len(self.texts))]

    def operation(self, index: int) -> str:
        return re.sub(r"^@!?U?P\w+\s+", "", self.texts[index]).split()[0].split(".")[0]

    def _successors(self, index: int, labels: dict[str, int]) -> list[int]:
        text = self.texts[index]
        following = [index + 1] if index + 1 < len(self.texts) else []
        if branch := _BRANCH.match(text):
            return [labels[branch[2]], *(following if branch[1] else [])]
        return [] if _EXIT.match(text) else following  # `@P0 EXIT` does not match: it may fall through

    def loops(self) -> list[frozenset[int]]:
        """The natural loops. A back edge goes to an instruction that is on every path to the edge's source.

        Not every jump backwards makes a loop: the spinning part of a barrier's wait is after the kernel's end and jumps
        back to the wait.
        """
        before: list[list[int]] = [[] for _ in self.texts]
        for i, successors in enumerate(self.next):
            for j in successors:
                before[j].append(i)
        bodies: dict[int, frozenset[int]] = {}
        for i, successors in enumerate(self.next):
            for head in successors:
                if head <= i and not self._reachable_without(i, head):
                    bodies[head] = bodies.get(head, frozenset()) | self._body(head, i, before)
        return list(bodies.values())

    def _reachable_without(self, goal: int, avoided: int) -> bool:
        seen, stack = {0, avoided}, [0] if avoided else []
        while stack:
            i = stack.pop()
            if i == goal:
                return True
            fresh = [j for j in self.next[i] if j not in seen]
            seen.update(fresh)
            stack += fresh
        return False

    @staticmethod
    def _body(head: int, source: int, before: list[list[int]]) -> frozenset[int]:
        seen, stack = {head, source}, [source] if source != head else []
        while stack:
            fresh = [j for j in before[stack.pop()] if j not in seen]
            seen.update(fresh)
            stack += fresh
        return frozenset(seen)
