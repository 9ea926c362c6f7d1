"""mbarriers: phases with a count of arrivals and of bytes under way; and fences (PTX ISA, "Parallel Synchronization").

An mbarrier's component of the clocks is the number of its completed phases. A copy by TMA that completes on it is done
at the number of the phase that is current when the copy starts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from scripts.lab.ptx.decode import Decoder, Execute, op
from scripts.lab.ptx.isa import Block, Immediate, Instruction, Warp
from scripts.lab.ptx.memory import SHARED_BASE

_SIZE = 8
MOST_BYTES = (1 << 20) - 1  # of the tx-count


@dataclass
class Mbarrier:
    """A barrier in shared memory."""

    address: int
    count: int  # arrivals of a phase
    component: int
    initialised_by: int  # a warp
    clock: np.ndarray  # of those that have arrived, and of their fences
    fenced: np.ndarray
    is_fenced: bool = False  # whether copies see its initialisation
    pending: int = 0  # arrivals
    bytes: int = 0  # expected and not copied yet
    phases: int = 0  # completed
    released: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)  # the clocks, by phase
    waiters: set[int] = field(default_factory=set)  # warps that have seen the last phase

    def __str__(self) -> str:
        return (
            f"the mbarrier at {self.address:#x}: in phase {self.phases}, {self.pending} of {self.count} arrivals are "
            f"missing, and {self.bytes} expected bytes"
        )

    def arrive(self, w: Warp, threads: int) -> None:
        """Some threads of a warp arrive."""
        if threads > self.pending:
            w.report("mbarrier", f"{threads} threads arrive at {self}")
        np.maximum(self.clock, w.clock, out=self.clock)
        np.maximum(self.fenced, w.fenced, out=self.fenced)
        w.tick()
        self.pending -= threads
        self.check(w)

    def add_bytes(self, w: Warp, count: int) -> None:
        """Expected bytes; those of a copy that has landed are negative."""
        self.bytes += count
        if abs(self.bytes) > MOST_BYTES:
            w.report("mbarrier", f"the bytes are beyond the range of the tx-count: {self}")
        self.check(w)

    def check(self, w: Warp) -> None:
        """Completes the phase if nothing is missing."""
        if self.pending <= 0 and not self.bytes:
            if self.phases and not self.waiters:
                message = f"phase {self.phases} completes, and no warp has seen the phase before: the {self}"
                w.report("phase missed", message.replace("the the", "the"))
            self.phases += 1
            self.pending = self.count
            self.released.append((self.clock.copy(), self.fenced.copy()))
            self.waiters.clear()


def barriers_of(block: Block) -> dict[int, Mbarrier]:
    """Those of a block, by their addresses."""
    return block.state.setdefault("mbarriers", {})


def found_at(w: Warp, address: int, *, by_copy: bool = False) -> Mbarrier | None:
    """The mbarrier there. Reports if there is none, or if its initialisation is not visible.

    Args:
        by_copy: it is used through the async proxy.
    """
    here = barriers_of(w.block).get(address)
    if here is None:
        w.report("mbarrier", f"there is no mbarrier at {address:#x}")
        return None
    w.block.shadow.read(w, np.array([address - SHARED_BASE]), _SIZE)
    if by_copy and not here.is_fenced:
        w.report("proxy", f"warp {here.initialised_by} has executed no fence after its mbarrier.init of {here}")
    return here


def shared_address(w: Warp, address: int) -> int:
    """An address in the shared window of generic ones, or in the shared space, as one of the shared space."""
    memory = w.block.memory
    return address - memory.shared_generic + SHARED_BASE if address >= memory.shared_generic else address


@op("mbarrier.init", writes=0)
def init(ins: Instruction, d: Decoder) -> Execute:
    """A new mbarrier in its first phase."""
    address, count = d.address(ins.operands[0]), d.source(ins.operands[1], "u32")

    def run(w: Warp) -> None:
        lane = int(w.mask.argmax())
        w.block.memory.store(w, address(w), np.zeros((32, _SIZE), np.uint8), "shared")
        place, threads = shared_address(w, int(address(w)[lane])), int(count(w)[lane])
        if place in barriers_of(w.block):
            w.report("mbarrier", f"initialises {barriers_of(w.block)[place]} again")
        component = w.block.clocks.component(f"the mbarrier at {place:#x}")
        clocks = np.zeros_like(w.clock), np.zeros_like(w.clock)
        barriers_of(w.block)[place] = Mbarrier(place, threads, component, w.index, *clocks, pending=threads)

    return run


@op("mbarrier.arrive")
def arrive(ins: Instruction, d: Decoder) -> Execute:
    """Every lane arrives, after it has added the bytes that it expects."""
    expects = "expect_tx" in ins.parts
    if "noComplete" in ins.parts:
        raise NotImplementedError(ins.opcode)
    address = d.address(ins.operands[1])
    number = d.source(ins.operands[2] if len(ins.operands) > 2 else Immediate(1), "u32")
    put = d.target(ins.operands[0], "u64")

    def run(w: Warp) -> None:
        addresses, numbers = address(w), number(w)
        for place in np.unique(addresses[w.mask]):
            lanes = w.mask & (addresses == place)
            if here := found_at(w, shared_address(w, int(place))):
                total = int(numbers[lanes].sum())
                if expects:
                    here.add_bytes(w, total)
                here.arrive(w, int(lanes.sum()) if expects else total)
                put(w, np.full(32, here.phases, np.uint64))

    return run


@op("mbarrier.try_wait.parity")
def wait(ins: Instruction, d: Decoder) -> Execute:
    """Waits for the end of the phase with this parity: the current one, or the one before, which has ended."""
    put, address = d.target(ins.operands[0], "pred"), d.address(ins.operands[1])
    parity, where = d.source(ins.operands[2], "u32"), ins.source or ins.line

    def run(w: Warp) -> None:
        places, wanted = address(w)[w.mask], parity(w)[w.mask]
        if (places != places[0]).any() or (wanted != wanted[0]).any():
            raise NotImplementedError("lanes wait at different mbarriers")
        here, odd = found_at(w, shared_address(w, int(places[0]))), int(wanted[0])
        if here is None:
            put(w, np.ones(32, bool))
            return

        def seen() -> None:
            if here.phases:
                w.join(*here.released[-1])
                w.observe(here.component, here.phases)
            here.waiters.add(w.index)
            put(w, np.ones(32, bool))

        w.wait(lambda: here.phases & 1 != odd, lambda: f"a phase of parity {odd} at {where} of {here}", seen)

    return run


@op("fence.proxy.async", "fence.mbarrier_init", writes=0)
def fence(ins: Instruction, d: Decoder) -> Execute:
    """What the warp has done and seen through the generic proxy is visible to the async proxy, and the reverse; or only
    its new mbarriers."""
    del d
    whole = "proxy" in ins.parts

    def run(w: Warp) -> None:
        if whole:
            np.maximum(w.fenced, w.clock, out=w.fenced)
        for barrier in barriers_of(w.block).values():
            barrier.is_fenced |= barrier.initialised_by == w.index

    return run


@op("setmaxnreg", writes=0)
def set_registers(ins: Instruction, d: Decoder) -> Execute:
    """Gives registers back to the block's pool, or waits for more. PTX ISA, "setmaxnreg"."""
    del d
    (count,) = ins.operands
    assert isinstance(count, Immediate)
    wanted = count.value

    def run(w: Warp) -> None:
        w.expect(0xFFFFFFFF)
        threads = 32 * len(w.block.warps)
        at_launch = min(65536 // threads // 8 * 8, 255 // 8 * 8)
        pool = w.block.state.setdefault("registers", {warp.index: at_launch for warp in w.block.warps})
        if wanted % 8 or not 24 <= wanted <= 256:
            w.report("setmaxnreg", f"{wanted} registers are no multiple of 8 from 24 to 256")
        if (wanted > pool[w.index]) is not ("inc" in ins.parts) and wanted != pool[w.index]:
            w.report("setmaxnreg", f"from {pool[w.index]} registers to {wanted}")
        whole = at_launch * len(w.block.warps)

        def fits() -> bool:
            return sum(pool.values()) - pool[w.index] + wanted <= whole

        def take() -> None:
            pool[w.index] = wanted

        what = f"{wanted} registers for each thread; the block has {whole} for its warps, with"
        w.wait(fits, lambda: f"{what} {pool}", take)

    return run
