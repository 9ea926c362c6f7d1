"""Asynchronous work of a block, and the groups in which a warp waits for it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from scripts.lab.ptx.decode import Decoder, Execute, op
from scripts.lab.ptx.isa import Instruction, Warp


@dataclass(eq=False)
class Work:
    """Asynchronous work that is under way."""

    ins: Instruction
    description: str
    land: Callable[[], None]
    order: Hashable = None  # works with the same one land in their order
    component: int | None = None  # of the clocks: somebody must have waited for `time` when the block ends
    time: int = 0


@dataclass
class Groups:
    """The groups of a warp's works of one kind, counted from 1."""

    kind: str  # the beginning of its opcodes
    component: int
    committed: int = 0
    waited: int = 0

    @classmethod
    def of(cls, w: Warp, kind: str) -> Groups:
        """Those of a warp. Only cp.async accesses memory through the generic proxy."""
        if (kind, w.index) not in w.block.state:
            component = w.block.clocks.component(f"{kind} of warp {w.index}", async_proxy=kind != "cp.async")
            w.block.state[kind, w.index] = cls(kind, component)
        return w.block.state[kind, w.index]

    @property
    def owner(self) -> str:
        """The name by which the group that is open now owns registers."""
        return f"{self.kind} group {self.committed + 1}"

    def wait(self, w: Warp, left: int) -> None:
        """All but the last groups have landed, and the warp has seen it."""
        reached = max(self.committed - left, self.waited)
        w.block.force(lambda work: work.component == self.component and work.time <= reached)
        w.observe(self.component, reached)
        for group in range(self.waited + 1, reached + 1):
            w.release(f"{self.kind} group {group}")
        self.waited = reached


@op("cp.async.commit_group", "cp.async.bulk.commit_group", "wgmma.commit_group", writes=0)
def commit(ins: Instruction, d: Decoder) -> Execute:
    """Closes a group."""
    del d
    kind, _, form = ins.opcode.partition(".commit_group")

    def run(w: Warp) -> None:
        if form:
            w.expect(w.live)
        Groups.of(w, kind).committed += 1

    return run


@op("cp.async.wait_group", "cp.async.bulk.wait_group", "wgmma.wait_group", writes=0)
def wait(ins: Instruction, d: Decoder) -> Execute:
    """Waits until all groups but the last ones have landed.

    Without `.read`, a bulk group has also been written when it ends. That only matters to other kernels, which begin
    after all copies have ended.
    """
    kind, _, form = ins.opcode.partition(".wait_group")
    left = d.source(ins.operands[0], "u32")

    def run(w: Warp) -> None:
        if "aligned" in form:
            w.expect(w.live)
        Groups.of(w, kind).wait(w, int(left(w)[0]))

    return run
