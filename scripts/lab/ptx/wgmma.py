"""Products of a warpgroup: wgmma (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions").

Each warp computes its 16 rows. A product reads shared memory and registers, and writes its accumulators, when it lands.
Until a wait for its group has ended, no other instruction may even read its registers, those of A included (the same,
"wgmma.wait_group"). Products are exact, and summed in float32 in an order of the machine's choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import ml_dtypes
import numpy as np

from scripts.lab.ptx.decode import Decoder, Execute, op, registers_of
from scripts.lab.ptx.isa import Immediate, Instruction, Vector, Warp
from scripts.lab.ptx.memory import SHARED_BASE
from scripts.lab.ptx.tma import CHUNK, swizzled
from scripts.lab.ptx.work import Groups, Work

_SWIZZLES = (16, 128, 64, 32)  # bytes, by the descriptor's mode; 16: none
_KINDS = {"bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype(np.float16)}
_ROWS, _DEPTH = 16, 16  # of a warp; elements of 16 bits
ALL = 0xFFFFFFFF


@dataclass(frozen=True)
class Descriptor:
    """Where a matrix is in shared memory (PTX ISA, "Matrix Descriptor Format")."""

    start: int
    leading: int  # byte offsets
    stride: int
    base_offset: int
    swizzle: int

    @classmethod
    def of(cls, bits: int) -> Descriptor:
        """From its 64 bits."""
        start, leading, stride = ((bits >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
        return cls(start, leading, stride, bits >> 49 & 7, _SWIZZLES[bits >> 62 & 3])

    def addresses(self, rows: range, *, transposed: bool) -> np.ndarray:
        """Of the elements [rows, 16]; a row is a row of A, or a column of B. `transposed`: rows are contiguous, and not
        the products' dimension. (PTX ISA, "Strides" and "Canonical layouts")
        """
        row, k = np.array(rows)[:, None], np.arange(_DEPTH)[None, :]
        if not transposed:
            within = row % 8 * self.swizzle + row // 8 * self.stride
            offsets = within + (k * 2 if self.swizzle > 16 else k // 8 * self.leading + k % 8 * 2)
        else:
            width = self.swizzle // 2
            blocks, steps = (self.leading, self.stride) if self.swizzle > 16 else (self.stride, self.leading)
            offsets = row // width * blocks + row % width * 2 + k % 8 * self.swizzle + k // 8 * steps
        return swizzled(self.start + offsets, self.swizzle)


@lru_cache(maxsize=512)
def places(bits: int, first: int, count: int, transposed: bool) -> tuple[np.ndarray, np.ndarray]:
    """The 16-bit words in shared memory of a descriptor's rows, [rows, 16], and where their 16-byte chunks begin."""
    at = Descriptor.of(bits).addresses(range(first, first + count), transposed=transposed) - SHARED_BASE
    return at // 2, np.unique(at // CHUNK) * CHUNK


@op("wgmma.fence", writes=0)
def fence(ins: Instruction, d: Decoder) -> Execute:
    """Registers that were written before may be used by products after it."""
    del ins, d

    def run(w: Warp) -> None:
        w.expect(ALL)
        w.unfenced = set()

    return run


@op("wgmma.mma_async.sync.aligned", accumulates=True, touches_owned=True)
def multiply(ins: Instruction, d: Decoder) -> Execute:
    """D = A B + D: 64 x 16 by 16 x N."""
    shape, *kinds = ins.parts[4:]
    columns = int(shape.removeprefix("m64n").removesuffix("k16"))
    if len(kinds) != 3 or kinds[0] != "f32" or kinds[1] != kinds[2] or kinds[1] not in _KINDS or "k16" not in shape:
        raise NotImplementedError(ins.opcode)
    kind = _KINDS[kinds[1]]
    result, left, right, scale, *options = ins.operands
    from_registers = isinstance(left, Vector)
    accumulators = d.places(result, columns // 2)
    left_words = d.places(left, 4) if from_registers else None
    numbers = [option.value for option in options if isinstance(option, Immediate)]
    transposed_left, transposed_right = (0, numbers[2]) if from_registers else numbers[2:4]
    if numbers[:2] != [1, 1]:
        raise NotImplementedError(ins.text)
    sums = [r.row for r in registers_of([result])]
    fragments = [r.row for r in registers_of([left])] if from_registers else []
    accumulates = d.source(scale, "pred")
    descriptors = [d.source(x, "u64") for x in ([right] if from_registers else [right, left])]

    def checked(w: Warp, groups: Groups, get: object, first: int, count: int, transposed: int) -> np.ndarray | None:
        """The 16-bit words of an operand in shared memory. None if they may not be read."""
        values = get(w)  # type: ignore[operator]
        bits = int(values[0])
        if (values != values[0]).any():
            w.report("descriptor", "the lanes have different descriptors")
        found, shared = Descriptor.of(bits), w.block.shared
        if found.start >> 7 & (found.swizzle // 16 - 1) or found.base_offset:
            w.report("misaligned", f"a matrix with swizzle {found.swizzle} begins at {found.start:#x}: {found}")
        at, chunks = places(bits, first, count, bool(transposed))
        if chunks[0] < 0 or chunks[-1] + CHUNK > shared.size:
            w.report("out of bounds", f"{found} reaches beyond shared memory")
            return None
        w.block.memory.check_defined(w, shared, chunks, CHUNK)
        w.block.shadow.read_async(w, chunks, groups.component, groups.committed + 1)
        return at

    def check_registers(w: Warp) -> None:
        name = w.program.kernel.registers
        if w.unfenced is None:
            w.report("missing wgmma.fence", "no wgmma.fence is before the first product")
        elif changed := w.unfenced.intersection(sums + fragments):
            names = ", ".join(name[row].name for row in sorted(changed)[:4])
            w.report("missing wgmma.fence", f"{names} were written after the last wgmma.fence")
        # Products under way may share accumulators or fragments of A, but one's must not be the other's.
        for does, rows in (("writes", sums), ("reads", fragments)):
            for row in rows:
                if row in w.owned and w.owned[row][1] != (does == "writes"):
                    w.report("register under way", f"{does} {name[row].name}, which belongs to {w.owned[row][0]}")

    def run(w: Warp) -> None:
        w.expect(ALL)
        check_registers(w)
        groups = Groups.of(w, "wgmma")
        b_at = checked(w, groups, descriptors[0], 0, columns, transposed_right)
        a_at = None
        if not from_registers:
            a_at = checked(w, groups, descriptors[1], w.index % 4 * _ROWS, _ROWS, transposed_left)
        if b_at is None or (a_at is None and not from_registers):
            return
        time, adds = groups.committed + 1, bool(accumulates(w)[0])
        w.own(sums, groups.owner, are_written=True)
        w.own(fragments, groups.owner, are_written=False)
        w.unfenced = (w.unfenced or set()).difference(sums)

        def land() -> None:
            data, floats = w.block.shared.words[2], w.views.floats
            if a_at is None:
                registers = w.views.words[left_words].view(kind)
                a = registers.reshape(2, 2, 8, 4, 2).transpose(1, 2, 0, 3, 4).reshape(_ROWS, _DEPTH)
            else:
                a = data[a_at].view(kind)
            product = a.astype(np.float32) @ data[b_at].view(kind).astype(np.float32).T
            parts = product.reshape(2, 8, columns // 8, 4, 2).transpose(2, 0, 4, 1, 3).reshape(-1, 32)
            floats[accumulators] = floats[accumulators] + parts if adds else parts

        what = f"a product of warp {w.index}"
        order = ("wgmma", w.index)
        w.block.launch(Work(ins, what, land, order=order, component=groups.component, time=time))

    return run
