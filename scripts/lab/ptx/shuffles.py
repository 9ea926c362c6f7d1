"""What the lanes of a warp do together: shuffles and elections."""

from __future__ import annotations

import numpy as np

from scripts.lab.ptx.decode import Decoder, Execute, op
from scripts.lab.ptx.isa import Immediate, Instruction, Vector, Warp

LANES = np.arange(32)


@op("shfl.sync")
def shuffle(ins: Instruction, d: Decoder) -> Execute:
    """Each lane reads another's register. PTX ISA, "shfl.sync"."""
    mode, target = ins.parts[2], ins.operands[0]
    if isinstance(target, Vector) or mode not in ("idx", "bfly"):
        raise NotImplementedError(ins.text)
    put, a, members = d.target(target, "b32"), d.source(ins.operands[1], "b32"), d.source(ins.operands[4], "u32")
    b, c = (d.source(operand, "u32") for operand in ins.operands[2:4])
    always = all(isinstance(operand, Immediate) for operand in ins.operands[2:4])

    def sources(w: Warp) -> np.ndarray:
        by, bounds = (get(w).astype(np.int64) for get in (b, c))
        clamp, segment = bounds & 31, bounds >> 8 & 31
        source = (LANES & segment) | (by & 31 & ~segment) if mode == "idx" else LANES ^ (by & 31)
        return np.where(source <= (LANES & segment) | (clamp & ~segment), source, LANES)

    known = sources(None) if always else None

    def run(w: Warp) -> None:
        w.expect(int(members(w)[w.mask.argmax()]))
        source = sources(w) if known is None else known
        if not w.mask[source[w.mask]].all():
            w.report("divergence", "reads the register of a lane that does not execute it")
        put(w, a(w)[source])

    return run


@op("elect.sync")
def elect(ins: Instruction, d: Decoder) -> Execute:
    """The lowest lane of the mask is elected."""
    (leader, chosen), members = ins.operands[0].parts, d.source(ins.operands[1], "u32")  # type: ignore[union-attr]
    put_leader, put_chosen = d.target(leader, "b32"), d.target(chosen, "pred")

    def run(w: Warp) -> None:
        mask = int(members(w)[w.mask][0])
        w.expect(mask)
        first = (mask & -mask).bit_length() - 1
        put_leader(w, np.full(32, first, np.uint32))
        put_chosen(w, np.equal(LANES, first))

    return run
