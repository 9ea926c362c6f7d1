"""cp.async: copies from global to shared memory that a thread starts, and waits for in groups.

They access memory through the generic proxy. A thread sees its copies after its own wait; others see them after a
barrier, too (PTX ISA, "Data Movement and Conversion Instructions: Asynchronous copy").
"""

from __future__ import annotations

import numpy as np

from scripts.lab.ptx.decode import Decoder, Execute, op
from scripts.lab.ptx.isa import Immediate, Instruction, Warp
from scripts.lab.ptx.work import Groups, Work


@op("cp.async.cg.shared.global", "cp.async.ca.shared.global", writes=0)
def copy(ins: Instruction, d: Decoder) -> Execute:
    """Each lane copies 4, 8 or 16 bytes."""
    to, source, size = d.address(ins.operands[0]), d.address(ins.operands[1]), ins.operands[2]
    if len(ins.operands) > 3 or not isinstance(size, Immediate):
        raise NotImplementedError(ins.text)
    width = size.value

    def run(w: Warp) -> None:
        memory, shared, groups = w.block.memory, w.block.shared, Groups.of(w, "cp.async")
        goals = np.zeros(32, np.int64)
        copied = np.zeros(32, bool)  # whose places are in bounds
        for _, lanes, starts in memory.places(w, to(w), width, "shared", "writes"):
            goals[lanes], copied[lanes] = starts, True
        moves = []
        for array, lanes, starts in memory.places(w, source(w), width, "global", "reads"):
            memory.check_defined(w, array, starts, width, lanes)
            here = copied[lanes]
            moves.append((array, starts[here], goals[lanes[here]]))
        time = groups.committed + 1
        w.block.shadow.write_async(w, goals[copied], groups.component, time, width=width, proxy="generic")
        shared.define(goals[copied], width)

        def land() -> None:
            for array, starts, goal in moves:
                shared.put(goal, array.get(starts, width))

        w.block.launch(Work(ins, f"a copy of warp {w.index}", land, component=groups.component, time=time))

    return run
