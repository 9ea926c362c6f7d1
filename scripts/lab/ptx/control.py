"""Branches, barriers of a block, and where lanes that went different ways meet again."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from scripts.lab.ptx.decode import Decoder, Execute, op
from scripts.lab.ptx.isa import Instruction, Kernel, Label, Warp

_ENDS = ("ret", "exit", "trap")


@op("bra", writes=0)
def branch(ins: Instruction, d: Decoder) -> Execute:
    """Lanes of the mask jump."""
    (label,) = ins.operands
    assert isinstance(label, Label), ins
    target = d.kernel.labels[label.name]
    return lambda w: w.branch(target, w.bits)


@op("ret", "exit", writes=0)
def end(ins: Instruction, d: Decoder) -> Execute:
    """Lanes of the mask end."""
    del ins, d
    return lambda w: w.exit()


@op("prefetch", "griddepcontrol", "nanosleep", writes=0, checks=False)
def nothing(ins: Instruction, d: Decoder) -> Execute:
    """A hint."""
    del ins, d
    return lambda w: None


@dataclass
class Barrier:
    """One use of a named barrier."""

    expected: int  # threads
    clock: np.ndarray
    fenced: np.ndarray
    arrived: list[int] = field(default_factory=list)  # warps
    complete: bool = False


@op("bar.sync", "barrier.sync", "bar.arrive", "barrier.arrive", "barrier.cta.sync", writes=0)
def barrier(ins: Instruction, d: Decoder) -> Execute:
    """Warps meet. PTX ISA, "bar": whole warps count, and all lanes of a warp must execute the same one."""
    which = d.source(ins.operands[0], "u32")
    count = d.source(ins.operands[1], "u32") if len(ins.operands) > 1 else None
    waits = "sync" in ins.parts

    def run(w: Warp) -> None:
        w.expect(w.live)
        name = int(which(w)[w.mask][0])
        threads = int(count(w)[w.mask][0]) if count else 0
        if threads % 32:
            w.report("barrier", f"{threads} threads are not whole warps")
        meet(w, name, threads, waits=waits)

    return run


def meet(w: Warp, name: int, threads: int, *, waits: bool) -> None:
    """A warp arrives at a named barrier. `threads`: 0 for all of the block."""
    barriers: dict[int, Barrier] = w.block.state.setdefault("barriers", {})
    here = barriers.get(name)
    if here is None:
        here = barriers[name] = Barrier(threads, np.zeros_like(w.clock), np.zeros_like(w.fenced))
    elif here.expected != threads:
        w.report("barrier", f"barrier {name} with {threads} threads, where another warp said {here.expected}")
    if w.index in here.arrived:
        w.report("barrier", f"arrives twice at barrier {name}")
    here.arrived.append(w.index)
    np.maximum(here.clock, w.clock, out=here.clock)
    np.maximum(here.fenced, w.fenced, out=here.fenced)
    w.tick()

    def complete() -> bool:
        if not here.complete:
            everyone = sum(not (other.done) for other in w.block.warps)
            if len(here.arrived) >= (here.expected // 32 or everyone):
                here.complete = True
                del barriers[name]
        return here.complete

    complete()
    if waits:
        what = f"barrier {name} (warps that have arrived: "
        w.wait(complete, lambda: f"{what}{here.arrived})", lambda: w.join(here.clock, here.fenced))


def reconvergence(kernel: Kernel) -> dict[int, int]:
    """For each branch under a predicate, the first instruction that all paths from it share; -1: the kernel's end.

    These are the immediate post-dominators, by the data-flow equations on sets kept as bits.
    """
    code = kernel.instructions
    starts = sorted({0, *kernel.labels.values(), *(i.index + 1 for i in code if i.parts[0] in ("bra", *_ENDS))})
    starts = [start for start in starts if start < len(code)]
    number = {start: k for k, start in enumerate(starts)}
    ends = [*starts[1:], len(code)]
    following: list[list[int]] = []
    for stop in ends:
        last = code[stop - 1]
        found = (
            [number[stop]] if stop < len(code) and not (last.parts[0] in ("bra", *_ENDS) and not last.predicate) else []
        )
        if last.parts[0] == "bra":
            (label,) = last.operands
            assert isinstance(label, Label)
            found.append(number[kernel.labels[label.name]])
        following.append(found)
    everything = (1 << len(starts)) - 1
    after = [everything] * len(starts)
    changed = True
    while changed:
        changed = False
        for k in reversed(range(len(starts))):
            common = everything if following[k] else 0
            for j in following[k]:
                common &= after[j]
            common |= 1 << k
            changed |= common != after[k]
            after[k] = common
    meets = {}
    for k, stop in enumerate(ends):
        last = code[stop - 1]
        if last.parts[0] == "bra" and last.predicate:
            strict = after[k] & ~(1 << k)
            # The nearest is the one that all the others come after.
            nearest = [j for j in range(len(starts)) if strict >> j & 1 and after[j] == strict]
            meets[stop - 1] = starts[nearest[0]] if nearest else -1
    return meets
