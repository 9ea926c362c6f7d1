"""What the lanes of a warp do together: shuffles, votes, elections."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from scripts.lab.ptx.decode import Decoder, Execute, op
from scripts.lab.ptx.isa import Instruction, Vector

if TYPE_CHECKING:
    from scripts.lab.ptx.machine import Warp

LANES = np.arange(32)


@op("shfl.sync")
def shuffle(ins: Instruction, d: Decoder) -> Execute:
    """Each lane reads another's register. PTX ISA, "shfl.sync"."""
    mode, target = ins.parts[2], ins.operands[0]
    if isinstance(target, Vector):
        raise NotImplementedError(ins.text)
    put, a, members = d.target(target, "b32"), d.source(ins.operands[1], "b32"), d.source(ins.operands[4], "u32")
    b, c = (d.source(operand, "u32") for operand in ins.operands[2:4])

    def run(w: Warp) -> None:
        w.expect(int(members(w)[w.mask][0]))
        by, bounds = (get(w).astype(np.int64) for get in (b, c))
        clamp, segment = bounds & 31, bounds >> 8 & 31
        last, first = (LANES & segment) | (clamp & ~segment), LANES & segment
        if mode == "idx":
            source = first | (by & 31 & ~segment)
            valid = source <= last
        elif mode == "up":
            source = LANES - (by & 31)
            valid = source >= last
        else:
            source = LANES + (by & 31) if mode == "down" else LANES ^ (by & 31)
            valid = source <= last
        source = np.where(valid, source, LANES)
        if not w.mask[source[w.mask]].all():
            w.report("divergence", "reads the register of a lane that does not execute it")
        put(w, a(w)[source])

    return run


@op("elect.sync", checks=True)
def elect(ins: Instruction, d: Decoder) -> Execute:
    """The lowest lane of the mask is elected."""
    (leader, chosen), members = ins.operands[0].parts, d.source(ins.operands[1], "u32")  # type: ignore[union-attr]
    put_leader, put_chosen = d.target(leader, "b32"), d.target(chosen, "pred")

    def run(w: Warp) -> None:
        mask = int(members(w)[w.mask][0])
        w.expect(mask)
        first = (mask & -mask).bit_length() - 1
        put_leader(w, np.full(32, first, np.uint32))
        put_chosen(w, LANES == first)

    return run


@op("vote.sync")
def vote(ins: Instruction, d: Decoder) -> Execute:
    """Whether a predicate holds in all lanes of the mask, in any, or in which."""
    mode = ins.parts[2]
    put = d.target(ins.operands[0], "b32" if mode == "ballot" else "pred")
    p, members = d.source(ins.operands[1], "pred"), d.source(ins.operands[2], "u32")

    def run(w: Warp) -> None:
        w.expect(int(members(w)[w.mask][0]))
        here = p(w) & w.mask
        if mode == "ballot":
            value = int.from_bytes(np.packbits(here, bitorder="little").tobytes(), "little")
            put(w, np.full(32, value, np.uint32))
        else:
            put(w, np.full(32, here.any() if mode == "any" else here[w.mask].all()))

    return run


@op("bar.warp.sync", writes=0)
def meet_lanes(ins: Instruction, d: Decoder) -> Execute:
    """The lanes of the mask meet."""
    members = d.source(ins.operands[0], "u32")
    return lambda w: w.expect(int(members(w)[w.mask][0]))
