"""Whether shared memory passes from the threads to the copy engine and the tensor cores with a fence, read from PTX.

Threads access shared memory through the generic proxy; bulk copies, wgmma and tcgen05 through the async proxy. What a
thread has read or written may be accessed through the async proxy once the thread has executed `fence.proxy.async` and
then met the other threads at a barrier. (The other direction needs no fence of its own: it is part of waiting for a
copy.) Here every path through a kernel is followed, for one thread; which bytes are accessed is not distinguished.

Source: PTX ISA, "Async proxy" and "Memory Consistency Model".
"""

from __future__ import annotations

import re

FENCE = "fence.proxy.async"
_GENERIC = re.compile(
    r"\b(?:ld|st|atom|red)(?:\.\w+)*\.shared\b|\b(?:ldmatrix|stmatrix)\b|\bcp\.async\.c[ag]\.shared\b"
)
_ASYNC = re.compile(r"\bcp\.async\.bulk\.(?!commit_group|wait_group)|\bwgmma\.mma_async\b|\btcgen05\.(?:mma|cp)\b")
_LABEL = re.compile(r"(\$L\w+):")
_BRANCH = re.compile(r"(@!?%\w+\s+)?bra(?:\.uni)?\s+(\$L\w+);")  # inline assembly waits at labels without a $
_END = re.compile(r"(?:ret|exit);")

# What the threads' last accesses are: ordered before async accesses, fenced but not yet by all threads, or neither.
ORDERED, FENCED, PENDING = range(3)


def unfenced_accesses(ptx: str) -> list[str]:
    """The instructions that access shared memory through the async proxy while threads' accesses are not ordered."""
    lines = [line.strip() for line in ptx.splitlines()]
    labels = {match[1]: i for i, line in enumerate(lines) if (match := _LABEL.match(line))}
    states: dict[int, int] = {}
    found, todo = set(), [(0, ORDERED)]
    while todo:
        i, state = todo.pop()
        if i == len(lines) or states.get(i, -1) >= state:
            continue
        states[i] = state
        if _ASYNC.search(lines[i]) and state != ORDERED:
            found.add(i)
        branch = _BRANCH.match(lines[i])
        state = _after(lines[i], state)
        if branch:
            todo.append((labels[branch[2]], state))
        if not _END.match(lines[i]) and (not branch or branch[1]):
            todo.append((i + 1, state))
    return [lines[i] for i in sorted(found)]


def _after(line: str, state: int) -> int:
    if _GENERIC.search(line):
        return PENDING
    if FENCE in line and state == PENDING:
        return FENCED
    if line.startswith(("bar.sync", "barrier.sync")) and state == FENCED:
        return ORDERED
    return state
