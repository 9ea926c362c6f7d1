"""Counts the instructions of a GPU kernel's inner loops, in its SASS with control codes (`gpu_report.Kernel.sass`), and
finds registers that are used too early.

A warpgroup starts its products (HGMMA) and goes on; `WARPGROUP.DEPBAR` waits for them. Until then the tensor cores read
a left operand from its registers, and write to those of the accumulator. Other tensor-core instructions (HMMA) end
before what needs their results, like any arithmetic.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

_INSTRUCTION = re.compile(r"\s+\S+:\S:\S:\S:(\d\d)\s+/\*[0-9a-f]+\*/\s+(.*)")
_LABEL = re.compile(r"(\.L_x_\d+):")
_BRANCH = re.compile(r"(?:(@!?U?P\w+)\s+)?BRA\S*\s.*?(\.L_x_\d+)")
_EXIT = re.compile(r"EXIT\b")
_PREDICATE = re.compile(r"^@!?U?P\w+\s+")
_PRODUCT = re.compile(r"HGMMA\.64x(\d+)x\d+\S* R(\d+), (?:R(\d+), )?")  # columns, accumulator, left operand
_ASYNCHRONOUS = re.compile(r"[A-Z]GMMA\b|UTC\w*MMA\b")  # products that an instruction starts and does not end
_REGISTER = re.compile(r"\bR(\d+)\b")
_RESULT = re.compile(r"(\S+)\s+(?:U?PT?\d*, )*R(\d+)(?!\S*\])")  # what is written is named first, after predicates
_WITHOUT_RESULT = ("ST", "RED", "SYNCS", "R2UR", "BAR", "UTMA", "BRA", "HGMMA", "ISETP", "FSETP", "PLOP3", "LOP3.LUT P")
_WIDTHS = {".64": 2, ".WIDE": 2, "M88.2": 2, ".96": 3, ".128": 4, "M88.4": 4}
_LEFT_REGISTERS = 4  # of a thread: 64 rows of 16 values of 16 bits
PRODUCTS = ("HMMA", "HGMMA")


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A loop with tensor-core instructions. Waiting loops inside it (spinning barriers) are not counted."""

    instructions: int  # per warp and turn
    stall_cycles: int  # the compiler's fixed stalls: a warp's least time to issue them, without memory waits
    operations: dict[str, int]
    overlapped: int  # exponentials that are issued while HGMMA into each of the loop's accumulators are under way

    @property
    def products(self) -> int:
        """Instructions of the tensor cores."""
        return sum(self.operations.get(name, 0) for name in PRODUCTS)


def read_loops(sass: str) -> list[Loop]:
    """The kernel's innermost loops with the most products, in the order of the code: of blocks that are multiplied both
    with the queries and with the values. Loops that do one of both, once for a tile, are left out."""
    code = _Code(sass)
    loops = [
        Loop(
            instructions=len(body),
            stall_cycles=sum(code.stalls[i] for i in body),
            operations=dict(Counter(code.operation(i) for i in body)),
            overlapped=code.overlapped(body),
        )
        for body in code.product_loops()
    ]
    most = max((loop.products for loop in loops), default=0)
    return [loop for loop in loops if loop.products == most]


def early_uses(sass: str) -> list[str]:
    """The instructions that write to a left operand, or touch an accumulator, of products that may be under way.

    PTX leaves open what happens then. The tensor cores read a left operand late if another warpgroup keeps them busy.

    Raises:
        ValueError: there is an asynchronous product whose registers are not known.
    """
    code = _Code(sass)
    for text in (_PREDICATE.sub("", text.strip()) for text in code.texts):
        if _ASYNCHRONOUS.match(text) and not _PRODUCT.match(text):
            raise ValueError(f"not known: which registers are used by {text!r}")
    under_way: list[tuple[frozenset[int], frozenset[int]] | None] = [None] * len(code.texts)  # before each instruction
    waiting = [(0, (frozenset[int](), frozenset[int]()))]
    while waiting:
        i, found = waiting.pop()
        known = under_way[i]
        merged = found if known is None else (known[0] | found[0], known[1] | found[1])
        if merged != known:
            under_way[i] = merged
            waiting += [(j, code.after(i, *merged)) for j in code.next[i]]
    return [code.texts[i].strip() for i, found in enumerate(under_way) if found and code.is_early(i, *found)]


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
        return _PREDICATE.sub("", self.texts[index]).split()[0].split(".")[0]

    def _successors(self, index: int, labels: dict[str, int]) -> list[int]:
        text = self.texts[index]
        following = [index + 1] if index + 1 < len(self.texts) else []
        if branch := _BRANCH.match(text):
            return [labels[branch[2]], *(following if branch[1] else [])]
        return [] if _EXIT.match(text) else following  # `@P0 EXIT` does not match: it may fall through

    def after(
        self, index: int, left: frozenset[int], accumulators: frozenset[int]
    ) -> tuple[frozenset[int], frozenset[int]]:
        """The registers of products under way, left operands and accumulators, given those before the instruction."""
        if "WARPGROUP.DEPBAR.LE gsb0, 0x0" in self.texts[index]:  # for all products, none left out
            return frozenset(), frozenset()
        if not (product := _PRODUCT.search(self.texts[index])):
            return left, accumulators
        columns, accumulator, own_left = product.groups()
        if own_left is not None:
            left |= {int(own_left) + k for k in range(_LEFT_REGISTERS)}
        return left, accumulators | {int(accumulator) + k for k in range(int(columns) // 2)}

    def is_early(self, index: int, left: frozenset[int], accumulators: frozenset[int]) -> bool:
        """Whether the instruction uses a register of products under way before it, as of `after`."""
        text = _PREDICATE.sub("", self.texts[index].strip())
        if _PRODUCT.match(text):  # products end in their order
            return False
        written = self._written(text)
        return bool(written & (left | accumulators)) or any(int(r) in accumulators for r in _REGISTER.findall(text))

    @staticmethod
    def _written(text: str) -> set[int]:
        result = None if text.startswith(_WITHOUT_RESULT) else _RESULT.match(text)
        if result is None:
            return set()
        operation, register = result.groups()
        width = max((n for mark, n in _WIDTHS.items() if mark in operation), default=2 if operation == "CS2R" else 1)
        return {int(register) + k for k in range(width)}

    def product_loops(self) -> list[list[int]]:
        """The innermost loops with matrix products, in the order of the code, without waiting loops inside them."""
        loops = self.loops()
        multiplying = [body for body in loops if any(self.operation(i) in PRODUCTS for i in body)]
        innermost = [body for body in multiplying if not any(other < body for other in multiplying)]
        return sorted(sorted(body.difference(*(other for other in loops if other < body))) for body in innermost)

    def overlapped(self, body: list[int]) -> int:
        """The exponentials of a loop that are issued while products run, also those of the turn before."""
        started = {i: match[2] for i in body if (match := _PRODUCT.match(self.texts[i]))}
        accumulators, found = set(started.values()), 0
        running: set[str] = set()
        for turn in range(2 if started else 0):
            for i in body:
                if i in started:
                    running.add(started[i])
                elif "WARPGROUP.DEPBAR" in self.texts[i]:
                    running.clear()
                elif "MUFU.EX2" in self.texts[i] and running == accumulators:
                    found += turn
        return found

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
