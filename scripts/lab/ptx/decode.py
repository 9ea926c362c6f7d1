"""The families of instructions, and what they need to turn an instruction into a function of a warp."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from scripts.lab.ptx import isa

type Execute = Callable[[isa.Warp], None]
type Get = Callable[[isa.Warp], np.ndarray]
type Put = Callable[[isa.Warp, np.ndarray], None]
type Make = Callable[[isa.Instruction, Decoder], Execute]

DTYPES = {
    "pred": np.dtype(bool), "bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype(np.float16),
    "u8": np.dtype(np.uint8), "s8": np.dtype(np.int8), "u16": np.dtype(np.uint16), "s16": np.dtype(np.int16),
    "u32": np.dtype(np.uint32), "s32": np.dtype(np.int32), "f32": np.dtype(np.float32),
    "u64": np.dtype(np.uint64), "s64": np.dtype(np.int64), "f64": np.dtype(np.float64),
}  # fmt: skip
DTYPES |= {f"b{bits}": DTYPES[f"u{bits}"] for bits in (8, 16, 32, 64)}
BANKS = {name: DTYPES[name] for name in ("pred", "b16", "b32", "b64")}


@dataclass(frozen=True, kw_only=True)
class Family:
    """How instructions of a family are decoded, and how they use registers."""

    make: Make
    writes: int = 1  # operands that are results, the first ones
    accumulates: bool = False  # the results are read, too
    checks: bool = True  # reads of unwritten registers are reported
    touches_owned: bool = False  # registers of asynchronous products may be used


FAMILIES: dict[str, Family] = {}


def op(*names: str, **uses: Any) -> Callable[[Make], Make]:
    """Registers what decodes opcodes that begin with one of these names, with the fields of its `Family`. The longest
    name counts."""

    def register(make: Make) -> Make:
        FAMILIES.update(dict.fromkeys(names, Family(make=make, **uses)))
        return make

    return register


def family_of(opcode: str) -> Family:
    """The family of an opcode.

    Raises:
        NotImplementedError: no family has it.
    """
    parts = opcode.split(".")
    for n in range(len(parts), 0, -1):
        if found := FAMILIES.get(".".join(parts[:n])):
            return found
    raise NotImplementedError(f"no family of instructions has {opcode}")


def registers_of(operands: Iterable[isa.Operand]) -> list[isa.Register]:
    """All registers that operands name."""
    found: list[isa.Register] = []
    for operand in operands:
        match operand:
            case isa.Register():
                found.append(operand)
            case isa.Address(base=base):
                found += registers_of([base])
            case isa.Vector(parts=parts):
                found += registers_of(parts)
            case isa.Coordinates(base=base, parts=parts):
                found += registers_of([base, *parts])
    return found


def uses(ins: isa.Instruction, family: Family) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The rows of the registers that an instruction reads, and those that it writes."""
    results, others = ins.operands[: family.writes], ins.operands[family.writes :]
    results_in_memory = [r for r in results if isinstance(r, (isa.Address, isa.Coordinates))]
    written = registers_of(r for r in results if not isinstance(r, (isa.Address, isa.Coordinates)))
    read = registers_of([*results_in_memory, *others])
    if family.accumulates:
        read += written
    return tuple(dict.fromkeys(r.row for r in read)), tuple(r.row for r in written)


class Decoder:
    """Access to operands, for a kernel whose symbols have addresses."""

    def __init__(self, kernel: isa.Kernel, symbols: dict[str, int]) -> None:
        self.kernel, self.symbols = kernel, symbols
        banks = ([r for r in kernel.registers if r.bank == bank] for bank in BANKS)
        self.of_bank = {register.row: place for bank in banks for place, register in enumerate(bank)}

    def source(self, operand: isa.Operand, dtype: str) -> Get:
        """The operand's values in the lanes. The array must not be written."""
        kind = DTYPES[dtype]
        match operand:
            case isa.Register(row=row, bank=bank):
                if BANKS[bank].itemsize == kind.itemsize:
                    return lambda w: w.views[dtype][row]
                return lambda w: w.views[bank][row].astype(kind)  # the lowest bits
            case isa.Immediate(value=value):
                return self._constant(value, kind)
            case isa.Symbol(name=name):
                return self._constant(self.symbols[name], kind)
            case isa.Special(name=name):
                return lambda w: w.special(name).astype(kind)
            case isa.Address():
                return self.address(operand)
        raise TypeError(f"not a value: {operand}")

    @staticmethod
    def _constant(value: int, kind: np.dtype) -> Get:
        bits = BITS[kind.itemsize]
        values = np.full(32, value & ((1 << 8 * kind.itemsize) - 1), bits).view(kind)
        values.flags.writeable = False
        return lambda w: values

    def sources(self, operand: isa.Operand, dtype: str) -> list[Get]:
        """Those of each part of a vector."""
        parts = operand.parts if isinstance(operand, isa.Vector) else (operand,)
        return [self.source(part, dtype) for part in parts]

    def target(self, operand: isa.Operand, dtype: str) -> Put:
        """Writes values of the dtype to the lanes of the instruction's mask. Wider registers are sign-extended."""
        kind = DTYPES[dtype]
        match operand:
            case isa.Sink():
                return lambda w, values: None
            case isa.Register(row=row, bank=bank):
                same, wide = BANKS[bank].itemsize == kind.itemsize, BANKS[bank]
                view = dtype if same else bank

                def put(w: isa.Warp, values: np.ndarray) -> None:
                    if not same:
                        values = values.astype(wide)
                    if w.bits == FULL:
                        w.views[view][row][...] = values
                    else:
                        np.copyto(w.views[view][row], values, where=w.mask)

                return put
        raise TypeError(f"not a register: {operand}")

    def places(self, operand: isa.Operand, count: int) -> np.ndarray:
        """The rows of a vector's 32-bit registers in `Views.words`."""
        found = registers_of([operand])
        if len(found) != count or any(register.bank != "b32" for register in found):
            raise NotImplementedError(f"not {count} registers of 32 bits: {operand}")
        return np.array([self.of_bank[register.row] for register in found])

    def targets(self, operand: isa.Operand, dtype: str) -> list[Put]:
        """Those of each part of a vector."""
        parts = operand.parts if isinstance(operand, isa.Vector) else (operand,)
        return [self.target(part, dtype) for part in parts]

    def address(self, operand: isa.Operand) -> Get:
        """The addresses of the lanes, u64, with the offset."""
        if not isinstance(operand, isa.Address):
            return self.source(operand, "u64")
        offset = np.uint64(operand.offset & 0xFFFFFFFFFFFFFFFF)
        base = self.source(operand.base, "u64")
        if isinstance(operand.base, isa.Register) and operand.base.bank == "b32":
            narrow = self.source(operand.base, "u32")
            return lambda w: narrow(w).astype(np.uint64) + offset
        return (lambda w: base(w) + offset) if offset else base


BITS = {size: DTYPES[f"u{8 * size}"] for size in (2, 4, 8)} | {1: DTYPES["u8"]}
FULL = 0xFFFFFFFF
