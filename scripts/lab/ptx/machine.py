"""Runs a kernel: blocks one after another, warps of 32 lanes that take turns, and asynchronous work."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

import numpy as np

from scripts.lab.ptx import access, alu, copy, mbarrier, memory, shuffles, tensor, tma, wgmma  # noqa: F401, they register
from scripts.lab.ptx.control import reconvergence
from scripts.lab.ptx.decode import BANKS, DTYPES, FULL, Decoder, Execute, family_of, uses
from scripts.lab.ptx.hazards import MAX_COMPONENTS, Clocks, Hazard, Shadow
from scripts.lab.ptx.isa import Instruction, Kernel, Parameter
from scripts.lab.ptx.memory import MIDDLE, SHARED_BASE, WINDOW_BITS, Array, Memory
from scripts.lab.ptx.work import Work

LONGEST_TURN = 40  # instructions that a warp executes before another's turn, at most
MAX_INSTRUCTIONS = 3_000_000  # of a block


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """In which order warps run, and when asynchronous work lands."""

    seed: int = 0
    landing: str = "random"  # early: at once; late: only when it is waited for


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A kernel with its arguments."""

    kernel: Kernel
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    arguments: list[Any]  # as the kernel's parameters: arrays, numbers, tensor maps by their offsets in one
    cluster: tuple[int, int, int] = (1, 1, 1)


@dataclass(frozen=True)
class Decoded:
    """An instruction as the machine runs it."""

    ins: Instruction
    execute: Execute
    predicate: int  # the row of its register, or -1
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    checks: bool
    touches_owned: bool


class Program:
    """A decoded kernel."""

    def __init__(self, launch: Launch, arguments: list[Array | int]) -> None:
        kernel = launch.kernel
        self.launch, self.kernel = launch, kernel
        symbols, offset = {}, SHARED_BASE
        for variable in sorted(kernel.shared, key=lambda v: v.size == 0):  # the dynamic one comes last
            offset = -(-offset // variable.align) * variable.align
            offset = -(-offset // 1024) * 1024 if not variable.size else offset
            symbols[variable.name] = offset
            offset += variable.size
        self.shared_bytes = offset - SHARED_BASE + launch.shared_bytes
        self.arguments = dict(zip((p.name for p in kernel.parameters), arguments, strict=True))
        symbols |= {name: array.base for name, array in self.arguments.items() if isinstance(array, Array)}
        decoder = Decoder(kernel, symbols)
        self.meets = reconvergence(kernel)
        self.code = [self._decoded(ins, decoder) for ins in kernel.instructions]
        self.executed = bytearray(len(self.code))  # 1 for those that some lane has executed
        self.rows = {bank: [r.row for r in kernel.registers if r.bank == bank] for bank in BANKS}

    def parameter(self, name: str) -> bytes:
        """The bytes of a parameter."""
        match self.arguments[name]:
            case Array(inline=True) as array:
                return array.words[1].tobytes()
            case Array() as array:
                return array.base.to_bytes(8, "little")
            case value:
                return value.to_bytes(8, "little", signed=value < 0)

    @staticmethod
    def _decoded(ins: Instruction, decoder: Decoder) -> Decoded:
        family = family_of(ins.opcode)
        reads, writes = uses(ins, family)
        return Decoded(
            ins=ins,
            execute=family.make(ins, decoder),
            predicate=-1 if ins.predicate is None else ins.predicate.row,
            reads=reads,
            writes=writes,
            checks=family.checks,
            touches_owned=family.touches_owned,
        )


class Views(dict):
    """The registers of a warp as rows of a dtype, by its name."""

    def __init__(self, rows: dict[str, list[int]], count: int) -> None:
        super().__init__()
        self.count = count
        self.banks = {bank: (here, np.zeros((len(here), 32), DTYPES[bank])) for bank, here in rows.items()}
        self.words: np.ndarray = self.banks["b32"][1]  # all registers of 32 bits
        self.floats = self.words.view(np.float32)

    def __missing__(self, dtype: str) -> list[Any]:
        found: list[Any] = [None] * self.count
        for bank, (rows, values) in self.banks.items():
            if (bank == "pred") == (dtype == "pred") and values.dtype.itemsize == DTYPES[dtype].itemsize:
                for row, view in zip(rows, values.view(DTYPES[dtype]), strict=True):
                    found[row] = view
        self[dtype] = found
        return found


class Warp:
    """32 lanes with their registers."""

    def __init__(self, block: Block, index: int, views: Views) -> None:
        self.block, self.index, self.views = block, index, views
        self.number = block.number * 64 + index + 1  # in the grid, from 1
        self.program = block.program
        self.component = block.clocks.component(f"warp {index}", async_proxy=False)
        self.clock, self.fenced = np.zeros((2, MAX_COMPONENTS), np.int64)
        self.clock[self.component] = 1
        self.rng = block.rng
        self.defined = [0] * views.count
        self.owned: dict[int, tuple[str, bool]] = {}  # rows of products: whose, and whether it writes them
        self.unfenced: set[int] | None = None  # rows that were written after a wgmma.fence; None: there was none
        self.threads = index * 32 + np.arange(32)
        self.stack = [[0, FULL, -1]]  # pc, lanes, where they meet the others
        self.done = False
        self.waiting: tuple[Callable[[], bool], Callable[[], str], Callable[[], None]] | None = None
        self.now = block.program.code[0]
        self.bits, self.mask = FULL, np.ones(32, bool)
        self._active_bits, self._active = FULL, np.ones(32, bool)

    # ---- For families ----

    @property
    def line(self) -> int:
        """That of the instruction that it executes."""
        return self.now.ins.line

    @property
    def live(self) -> int:
        """The lanes that have not ended."""
        return reduce(or_, (lanes for _, lanes, _ in self.stack), 0)

    def special(self, name: str) -> np.ndarray:
        """The values of a special register."""
        return self.block.special(name, self.threads)

    def wait(self, condition: Callable[[], bool], what: Callable[[], str], then: Callable[[], None]) -> None:
        """The warp goes on after this instruction once the condition holds; `then` is called first. `what` says it."""
        self.waiting = condition, what, then

    def report(self, kind: str, message: str, lanes: Any = ()) -> None:
        """Reports a hazard of this instruction, once for each kind."""
        self.block.report(self, kind, message, tuple(int(lane) for lane in lanes))

    def expect(self, members: int) -> None:
        """All lanes of the mask must be here."""
        missing = members & FULL & ~self.bits
        if missing:
            self.report("divergence", "not all lanes of its mask reach it", lanes_of(missing))

    def observe(self, component: int, time: int) -> None:
        """The warp has seen a component at a time."""
        for clock in (self.clock, self.fenced):
            clock[component] = max(clock[component], time)

    def join(self, clock: np.ndarray, fenced: np.ndarray) -> None:
        """The warp has seen what others have seen."""
        np.maximum(self.clock, clock, out=self.clock)
        np.maximum(self.fenced, fenced, out=self.fenced)

    def tick(self) -> None:
        """After a release: later accesses are not part of it."""
        self.clock[self.component] += 1

    def own(self, rows: Iterable[int], owner: str, *, are_written: bool) -> None:
        """Registers belong to asynchronous work, which reads or writes them."""
        self.owned.update(dict.fromkeys(rows, (owner, are_written)))

    def release(self, owner: str) -> None:
        """The work of this name has ended."""
        self.owned = {row: use for row, use in self.owned.items() if use[0] != owner}

    def branch(self, target: int, taken: int) -> None:
        """The lanes `taken` go to an instruction, the other active ones to the next."""
        top = self.stack[-1]
        others = self._active_bits & ~taken
        if not others:
            top[0] = target
            return
        meeting = self.program.meets[self.now.ins.index]
        top[0] = meeting  # the others wait there, or end
        if meeting < 0:
            self.stack.pop()
        for pc, lanes in ((self.now.ins.index + 1, others), (target, taken)):
            if pc != meeting:
                self.stack.append([pc, lanes, meeting])
        self._enter()

    def exit(self) -> None:
        """The lanes of the mask end."""
        for entry in self.stack:
            entry[1] &= ~self.bits
        self._enter()

    # ---- For the machine ----

    def _enter(self) -> None:
        """Goes on with the lanes on top of the stack."""
        stack = self.stack
        while stack and (not stack[-1][1] or stack[-1][0] == stack[-1][2]):
            stack.pop()
        self.done = not stack
        if stack and stack[-1][1] != self._active_bits:
            self._active_bits = stack[-1][1]
            self._active = mask_of(self._active_bits)

    def ready(self) -> bool:
        """Whether it can execute an instruction now."""
        if self.done:
            return False
        if self.waiting is not None:
            condition, _, then = self.waiting
            if not condition():
                return False
            self.waiting = None
            then()
        return True

    def run(self, turns: int) -> int:
        """Executes some instructions. Returns how many."""
        code, defined, stack, executed = self.program.code, self.defined, self.stack, self.program.executed
        for turn in range(turns):
            top = stack[-1]
            pc = top[0]
            self.now = now = code[pc]
            top[0] = pc + 1
            bits, mask = self._active_bits, self._active
            if now.predicate >= 0:
                if bits & ~defined[now.predicate]:
                    self._unwritten((now.predicate,), bits)
                row = self.views["pred"][now.predicate]
                mask = (mask & ~row) if now.ins.negated else (mask & row)
                bits = bits_of(mask)
            if bits:
                executed[pc] = 1
                self.bits, self.mask = bits, mask
                if now.checks:
                    for row in now.reads:
                        if defined[row] != FULL and bits & ~defined[row]:
                            self._unwritten(now.reads, bits)
                            break
                    for row in now.writes:
                        defined[row] |= bits
                if self.owned and not now.touches_owned:
                    self._check_owned(now)
                if self.unfenced is not None and not now.touches_owned:
                    self.unfenced.update(now.writes)
                now.execute(self)
            if self.done or self.waiting is not None:
                return turn + 1
            if stack[-1][0] == stack[-1][2]:
                self._enter()
        return turns

    def _unwritten(self, rows: tuple[int, ...], bits: int) -> None:
        for row in rows:
            if missing := bits & ~self.defined[row]:
                self.report("unwritten register", f"reads {self._name(row)}", lanes_of(missing))
                self.defined[row] |= missing

    def _check_owned(self, now: Decoded) -> None:
        for row in {*now.reads, *now.writes} & self.owned.keys():
            does = "writes" if row in now.writes else "reads"
            self.report("register under way", f"{does} {self._name(row)}, which belongs to {self.owned[row][0]}")

    def _name(self, row: int) -> str:
        return self.program.kernel.registers[row].name


class Block:
    """A block (CTA) of the grid."""

    def __init__(self, machine: Machine, number: int, views: list[Views]) -> None:
        self.machine, self.number, self.program = machine, number, machine.program
        launch = self.program.launch
        x, y, _ = launch.grid
        self.place = (number % x, number // x % y, number // (x * y))
        self.rng = machine.rng
        self.clocks = Clocks()
        size = self.program.shared_bytes
        self.shared = Array("shared memory", np.zeros(size, np.uint8), defined=False)
        self.shadow = self.shared.shadow = Shadow(len(self.shared.words[1]), self.clocks, "shared memory")
        self.memory = Memory(machine.arrays, self.shared)
        self.state: dict[Any, Any] = {}
        self.works: deque[Work] = deque()
        self.early = machine.schedule.landing == "early"
        self.warps = [Warp(self, i, views[i]) for i in range(len(views))]

    def special(self, name: str, threads: np.ndarray) -> np.ndarray:
        """The values of a special register in these threads."""
        launch = self.program.launch
        base, _, axis = name.removeprefix("%").partition(".")
        i = "xyz".find(axis) if axis else 0
        if base == "tid":
            x, y, _ = launch.block
            return (threads % x, threads // x % y, threads // (x * y))[i]
        if base in ("ntid", "nctaid", "ctaid"):
            return np.full(32, {"ntid": launch.block, "nctaid": launch.grid, "ctaid": self.place}[base][i])
        if base == "laneid":
            return threads % 32
        if base.startswith("cluster_cta") and launch.cluster == (1, 1, 1):
            return np.zeros(32, int)
        raise NotImplementedError(f"special register {name}")

    def report(self, warp: Warp, kind: str, message: str, lanes: tuple[int, ...]) -> None:
        """Keeps the first hazard of each kind and instruction."""
        ins = warp.now.ins
        self.machine.hazards.setdefault((kind, ins.index), Hazard(kind, message, ins, self.place, warp.index, lanes))

    def launch(self, work: Work) -> None:
        """Starts asynchronous work."""
        self.works.append(work)
        if self.early:
            self._land(work)

    def force(self, needed: Callable[[Work], bool]) -> None:
        """Lands all works that are needed now."""
        for work in [work for work in self.works if needed(work)]:
            self._land(work)

    def _land(self, work: Work) -> None:
        if work.order is not None:
            for earlier in [other for other in self.works if other.order == work.order]:
                if earlier is work:
                    break
                self._land(earlier)
        if work in self.works:
            self.works.remove(work)
            work.land()
            self.machine.landed.append(work)

    def run(self) -> None:
        """Runs all warps to their ends."""
        rng, late, executed = self.rng, self.machine.schedule.landing == "late", 0
        while not all(warp.done for warp in self.warps):
            ready = [warp for warp in self.warps if warp.ready()]
            if not ready:
                if not self.works:
                    self._deadlock()
                    return
                self._land(self.works[0 if late else rng.integers(len(self.works))])
                continue
            if self.works and not late and rng.random() < 0.25:
                self._land(self.works[rng.integers(len(self.works))])
            executed += ready[rng.integers(len(ready))].run(int(rng.integers(1, LONGEST_TURN)))
            if executed > MAX_INSTRUCTIONS:
                self.warps[0].report("endless", f"the block has executed {executed} instructions")
                return
        self._end()

    def _deadlock(self) -> None:
        stuck = [warp for warp in self.warps if not warp.done]
        waits: dict[str, list[str]] = {}
        for warp in stuck:
            waits.setdefault(warp.waiting[1]() if warp.waiting else "nothing", []).append(str(warp.index))
        reasons = "; ".join(f"warp {', '.join(warps)} waits for {what}" for what, warps in waits.items())
        stuck[0].report("deadlock", f"no warp can go on: {reasons}")

    def _end(self) -> None:
        works = [*self.machine.landed, *self.works]
        while self.works:
            self._land(self.works[0])
        self.machine.landed.clear()
        for work in works:
            if work.component is not None and max(warp.clock[work.component] for warp in self.warps) < work.time:
                warp = self.warps[0]
                warp.now = self.program.code[work.ins.index]
                warp.report("never waited for", f"the block ends, and no warp has waited for {work.description}")


class Machine:
    """Runs a launch under a schedule."""

    def __init__(self, launch: Launch, schedule: Schedule) -> None:
        arguments = [_argument(*given) for given in zip(launch.kernel.parameters, launch.arguments, strict=True)]
        behind_maps = [each.array for x in arguments if isinstance(x, Array) and x.meta for each in x.meta.values()]
        self.arrays = list({id(a): a for a in [*arguments, *behind_maps] if isinstance(a, Array)}.values())
        for window, array in enumerate(self.arrays, start=1):
            array.base = (window << WINDOW_BITS) + MIDDLE
        self.program, self.schedule = Program(launch, arguments), schedule
        self.rng = np.random.default_rng(schedule.seed)
        self.hazards: dict[tuple[str, int], Hazard] = {}
        self.landed: list[Work] = []
        self.made_nan: dict[Instruction, None] = {}  # products of NaN with weights that are all 0

    def run(self) -> list[Hazard]:
        """The hazards; the arrays have the results."""
        launch = self.program.launch
        blocks, warps = int(np.prod(launch.grid)), -(-int(np.prod(launch.block)) // 32)
        views = [Views(self.program.rows, len(launch.kernel.registers)) for _ in range(warps)]
        with np.errstate(all="ignore"):
            for number in self.rng.permutation(blocks):
                Block(self, int(number), views).run()
        return list(self.hazards.values())


def _argument(parameter: Parameter, value: Any) -> Any:
    """Tensor maps become an array that is the parameter itself."""
    if not isinstance(value, dict):
        return value
    maps = Array("tensor maps", np.zeros(parameter.size, np.uint8), writable=False)
    maps.inline, maps.meta = True, value
    return maps


def run(launch: Launch, schedule: Schedule | None = None) -> list[Hazard]:
    """Executes a launch. Its arrays are written in place."""
    return Machine(launch, schedule or Schedule()).run()


def lanes_of(bits: int) -> tuple[int, ...]:
    """The lanes of a mask, as numbers."""
    return tuple(lane for lane in range(32) if bits >> lane & 1)


def mask_of(bits: int) -> np.ndarray:
    """The lanes of a mask, as bool[32]."""
    return np.array([bits >> lane & 1 for lane in range(32)], bool)


def bits_of(mask: np.ndarray) -> int:
    """The lanes of bool[32], as a mask."""
    return int.from_bytes(np.packbits(mask, bitorder="little").tobytes(), "little")
