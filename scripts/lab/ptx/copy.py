"""cp.async: copies from global to shared memory that a thread starts, and waits for in groups.

They access memory through the generic proxy. A thread sees its copies after its own wait; others see them after a
barrier, too (PTX ISA, "Data Movement and Conversion Instructions: Asynchronous copy").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from scripts.lab.ptx.decode import Decoder, Execute, op
from scripts.lab.ptx.isa import Immediate, Instruction
from scripts.lab.ptx.work import Work

if TYPE_CHECKING:
    from scripts.lab.ptx.machine import Warp


@dataclass
class Groups:
    """The groups of copies of a warp, counted from 1."""

    component: int
    committed: int = 0

    @classmethod
    def of(cls, w: Warp) -> Groups:
        """Those of cp.async."""
        key = ("cp.async", w.index)
        if key not in w.block.state:
            name = f"cp.async of warp {w.index}"
            w.block.state[key] = cls(w.block.clocks.component(name, async_proxy=False))
        return w.block.state[key]


@op("cp.async.cg.shared.global", "cp.async.ca.shared.global", writes=0)
def copy(ins: Instruction, d: Decoder) -> Execute:
    """Each lane copies 4, 8 or 16 bytes. With a smaller size of the source, the rest is zeros."""
    to, source, size = d.address(ins.operands[0]), d.address(ins.operands[1]), ins.operands[2]
    assert isinstance(size, Immediate)
    width = size.value
    given = d.source(ins.operands[3], "u32") if len(ins.operands) > 3 else None
    if any("L2" not in part for part in ins.parts[5:]):
        raise NotImplementedError(ins.opcode)

    def run(w: Warp) -> None:
        memory, shared, groups = w.block.memory, w.block.shared, Groups.of(w)
        assert shared.shadow is not None
        mask, time = w.mask, groups.committed + 1
        counts = np.full(32, width) if given is None else np.minimum(given(w), width).astype(np.int64)
        offsets = {int(lane): row for _, lanes, rows in memory.places(w, to(w), width, "shared", "writes") for lane, row in zip(lanes, rows, strict=True)}
        if not offsets:
            return
        moves = []
        w.mask = mask & (counts > 0)
        places = memory.places(w, source(w), width, "global", "reads") if given is None or w.mask.any() else []
        w.mask = mask
        rows = np.array(list(offsets.values()))
        shared.shadow.write_async(w, rows, groups.component, time, proxy="generic")
        shared.defined[rows] = True
        for array, lanes, froms in places:
            here = [i for i, lane in enumerate(lanes) if int(lane) in offsets]
            if not array.defined[froms[here]].all():
                w.report("unwritten memory", f"copies bytes of {array.name} that nobody wrote")
            goal = np.array([offsets[int(lanes[i])] for i in here])
            kept = np.arange(width) < counts[lanes[here]][:, None]
            moves.append((array, froms[here], goal, kept))

        def land() -> None:
            if given is not None:
                shared.data[rows] = 0
            for array, froms, goal, kept in moves:
                shared.data[goal] = np.where(kept, array.data[froms], 0)

        w.block.launch(Work(ins, f"a copy of warp {w.index}", land, component=groups.component, time=time))

    return run


@op("cp.async.commit_group", writes=0)
def commit(ins: Instruction, d: Decoder) -> Execute:
    """Closes a group."""
    del ins, d

    def run(w: Warp) -> None:
        Groups.of(w).committed += 1

    return run


@op("cp.async.wait_group", "cp.async.wait_all", writes=0)
def wait(ins: Instruction, d: Decoder) -> Execute:
    """Waits until all groups but the last ones have landed."""
    everything = ins.parts[-1] == "wait_all"
    left = d.source(ins.operands[0], "u32") if not everything else None

    def run(w: Warp) -> None:
        groups = Groups.of(w)
        reached = groups.committed + 1 if left is None else max(groups.committed - int(left(w)[0]), 0)
        w.block.force(lambda work: work.component == groups.component and work.time <= reached)
        w.observe(groups.component, reached)
        if left is None:
            groups.committed += 1

    return run
