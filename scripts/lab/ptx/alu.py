"""Arithmetic: integers, floating point, conversions, selections, and moves between registers.

Approximate instructions are off by an amount that the seed chooses, up to the ISA's bounds ("Floating-Point
Instructions"): 2^-22 of the result for ex2.approx.ftz, 2^-22 for lg2.approx.ftz, 2 ulp for div.full.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from scripts.lab.ptx.decode import BITS, DTYPES, FULL, Decoder, Execute, op
from scripts.lab.ptx.isa import Immediate, Instruction, Register, Vector, Warp

_WIDER = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}
_EX2_ERROR, _DIV_ERROR = 2.0**-22, 2.0**-23


def _same_type(*names: str) -> Callable:
    """Registers an instruction whose operands have one type, the last part of the opcode."""

    def register(of: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
        def make(ins: Instruction, d: Decoder) -> Execute:
            dtype = ins.parts[-1]
            target, put = ins.operands[0], d.target(ins.operands[0], dtype)
            gets = [d.source(operand, dtype) for operand in ins.operands[1:]]
            if not (isinstance(of, np.ufunc) and isinstance(target, Register) and target.bank[1:] == dtype[1:]):
                return lambda w: put(w, of(*[get(w) for get in gets]))
            row = target.row

            def run(w: Warp) -> None:  # without an array for the results
                of(*[get(w) for get in gets], out=w.views[dtype][row], where=True if w.bits == FULL else w.mask)

            return run

        op(*names)(make)
        return of

    return register


def _fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """In one rounding, up to those rare results that float64 rounds first."""
    return np.add(np.multiply(a, b, dtype=np.float64), c).astype(np.float32)


for _names, _of in {
    ("add.u16", "add.s16", "add.u32", "add.s32", "add.u64", "add.s64", "add.f32"): np.add,
    ("sub.u16", "sub.s16", "sub.u32", "sub.s32", "sub.u64", "sub.s64", "sub.f32"): np.subtract,
    ("mul.lo", "mul.f32"): np.multiply,
    ("mad.lo",): lambda a, b, c: a * b + c,
    ("fma.rn.f32",): _fused,
    ("neg",): np.negative,
    ("not.b16", "not.b32", "not.b64", "not.pred"): np.invert,
    ("and",): np.bitwise_and,
    ("or",): np.bitwise_or,
    ("xor",): np.bitwise_xor,
    ("min.u16", "min.s16", "min.u32", "min.s32", "min.u64", "min.s64"): np.minimum,
    ("max.u16", "max.s16", "max.u32", "max.s32", "max.u64", "max.s64"): np.maximum,
    ("max.NaN.f32",): np.maximum,
}.items():
    _same_type(*_names)(_of)


@op("add.f32x2", "mul.f32x2", "fma.rn.f32x2")
def packed(ins: Instruction, d: Decoder) -> Execute:
    """Two float32 in a register of 64 bits."""
    functions: dict[str, Callable[..., np.ndarray]] = {"add": np.add, "mul": np.multiply, "fma": _fused}
    of = functions[ins.parts[0]]
    put = d.target(ins.operands[0], "b64")
    gets = [d.source(operand, "b64") for operand in ins.operands[1:]]

    def run(w: Warp) -> None:
        put(w, of(*(get(w).view(np.float32) for get in gets)).view(np.uint64))

    return run


@op("mul.wide")
def wide(ins: Instruction, d: Decoder) -> Execute:
    """A product of twice the width."""
    narrow = ins.parts[-1]
    broad = _WIDER[narrow]
    put, kind = d.target(ins.operands[0], broad), DTYPES[broad]
    a, b = (d.source(operand, narrow) for operand in ins.operands[1:])
    return lambda w: put(w, a(w).astype(kind) * b(w))


@op("mul.hi")
def high(ins: Instruction, d: Decoder) -> Execute:
    """The upper half of a product."""
    narrow = ins.parts[-1]
    put, (a, b) = d.target(ins.operands[0], narrow), (d.source(operand, narrow) for operand in ins.operands[1:])
    if narrow.endswith("64"):
        kind = DTYPES[narrow]
        return lambda w: put(w, np.array([int(x) * int(y) >> 64 for x, y in zip(a(w), b(w), strict=True)], kind))
    kind, bits = DTYPES[_WIDER[narrow]], int(narrow[1:])
    return lambda w: put(w, (a(w).astype(kind) * b(w) >> bits).astype(DTYPES[narrow]))


@op("shl", "shr")
def shift(ins: Instruction, d: Decoder) -> Execute:
    """Shifts by more than the width give 0, or the sign."""
    dtype = ins.parts[-1]
    bits, kind = int(dtype[1:]), DTYPES[dtype]
    put, a = d.target(ins.operands[0], dtype), d.source(ins.operands[1], dtype)
    amount, of = d.source(ins.operands[2], "u32"), np.left_shift if ins.parts[0] == "shl" else np.right_shift
    extends = dtype[0] == "s"

    def run(w: Warp) -> None:
        by = amount(w)
        shifted = of(a(w), np.minimum(by, bits - 1).astype(kind))
        put(w, shifted if extends else np.where(by < bits, shifted, kind.type(0)))

    return run


@op("bfe")
def extract(ins: Instruction, d: Decoder) -> Execute:
    """Bits `[start, start + count)` of an operand, extended."""
    dtype = ins.parts[-1]
    bits, kind = int(dtype[1:]), DTYPES[dtype]
    put, a = d.target(ins.operands[0], dtype), d.source(ins.operands[1], dtype)
    start, count = ins.operands[2:]
    if not (isinstance(start, Immediate) and isinstance(count, Immediate)):
        raise NotImplementedError(ins.text)
    left = bits - min(start.value + count.value, bits)  # bits above the field
    right = bits - min(count.value, bits - start.value)
    return lambda w: put(w, a(w) << kind.type(left) >> kind.type(right))


@op("prmt.b32")
def permute(ins: Instruction, d: Decoder) -> Execute:
    """Bytes of two registers, chosen by four bits each; the highest bit of a choice repeats the byte's sign."""
    put, (a, b, chosen) = d.target(ins.operands[0], "u32"), (d.source(operand, "u32") for operand in ins.operands[1:])
    places = np.arange(4, dtype=np.uint32) * 4

    def run(w: Warp) -> None:
        source = np.stack([a(w), b(w)], 1).view(np.uint8)  # [32, 8]
        choice = (chosen(w)[:, None] >> places) & 15
        found = np.take_along_axis(source, (choice & 7).astype(np.int64), 1)
        found = np.where(choice & 8, (found.view(np.int8) >> 7).view(np.uint8), found)
        put(w, np.ascontiguousarray(found).view(np.uint32)[:, 0])

    return run


@op("selp")
def select(ins: Instruction, d: Decoder) -> Execute:
    """One of two operands, by a predicate."""
    dtype = ins.parts[-1]
    put, p = d.target(ins.operands[0], dtype), d.source(ins.operands[3], "pred")
    a, b = (d.source(operand, dtype) for operand in ins.operands[1:3])
    return lambda w: put(w, np.where(p(w), a(w), b(w)))


_COMPARISONS = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip


@op("setp")
def compare(ins: Instruction, d: Decoder) -> Execute:
    """A predicate. Comparisons of floats are false for NaN."""
    _, name, dtype = ins.parts
    if dtype[0] == "f" and name == "ne":
        raise NotImplementedError(ins.text)
    put, a, b = d.target(ins.operands[0], "pred"), d.source(ins.operands[1], dtype), d.source(ins.operands[2], dtype)
    test = _COMPARISONS[name]
    return lambda w: put(w, test(a(w), b(w)))


@op("mov", checks=False)
def move(ins: Instruction, d: Decoder) -> Execute:
    """A copy, which may be of an unwritten register; or packs and unpacks the halves of a register."""
    target, source = ins.operands
    dtype = "pred" if ins.parts[-1] == "pred" else "b" + ins.parts[-1][1:]
    if isinstance(source, Vector):
        part = f"b{int(dtype[1:]) // len(source.parts)}"
        gets, put = d.sources(source, part), d.target(target, dtype)
        rows = [p.row for p in source.parts if isinstance(p, Register)]

        def pack(w: Warp) -> None:
            put(w, np.stack([get(w) for get in gets], 1).view(BITS[int(dtype[1:]) // 8])[:, 0])

        return _copying(pack, [target], rows)
    if isinstance(target, Vector):
        part = f"b{int(dtype[1:]) // len(target.parts)}"
        puts, get = d.targets(target, part), d.source(source, dtype)
        rows = [source.row] if isinstance(source, Register) else []

        def unpack(w: Warp) -> None:
            values = np.ascontiguousarray(get(w)).view(DTYPES[part]).reshape(32, -1)
            for i, put in enumerate(puts):
                put(w, values[:, i])

        return _copying(unpack, target.parts, rows)
    put, get = d.target(target, dtype), d.source(source, dtype)
    rows = [source.row] if isinstance(source, Register) else []
    return _copying(lambda w: put(w, get(w)), [target], rows)


def _copying(execute: Execute, targets: Any, sources: list[int]) -> Execute:
    """The results are as defined as the sources."""
    written = [target.row for target in targets if isinstance(target, Register)]

    def run(w: Warp) -> None:
        execute(w)
        known = w.bits
        for row in sources:
            known &= w.defined[row]
        for row in written:
            w.defined[row] = (w.defined[row] & ~w.bits) | known

    return run


@op("cvta")
def to_space(ins: Instruction, d: Decoder) -> Execute:
    """Addresses in global memory and of parameters are generic addresses; those in shared memory are moved."""
    put, get = d.target(ins.operands[0], "u64"), d.source(ins.operands[1], "u64")
    if "shared" not in ins.opcode:
        return lambda w: put(w, get(w))
    to = "to" in ins.parts

    def run(w: Warp) -> None:
        start = np.uint64(w.block.memory.shared_generic - w.block.shared.base)
        put(w, get(w) - start if to else get(w) + start)

    return run


@op("cvt")
def convert(ins: Instruction, d: Decoder) -> Execute:
    """Between types. Results of 8 bits fill a wider register with their sign, or zeros."""
    to, of = ins.parts[-2:]
    if set(ins.parts[1:-2]) - {"rn"} or (to[0] in "us" and of[0] not in "us"):
        raise NotImplementedError(ins.opcode)
    if of.endswith("x2") or to.endswith("x2"):
        return _convert_pair(ins, d, to, of)
    put, get, kind = d.target(ins.operands[0], to), d.source(ins.operands[1], of), DTYPES[to]
    return lambda w: put(w, get(w).astype(kind))


def _convert_pair(ins: Instruction, d: Decoder, to: str, of: str) -> Execute:
    """The first operand becomes the upper half."""
    if of.endswith("x2"):  # fp8 in 16 bits
        import ml_dtypes

        eight = {"e4m3x2": ml_dtypes.float8_e4m3fn, "e5m2x2": ml_dtypes.float8_e5m2}[of]
        put, get, kind = d.target(ins.operands[0], "b32"), d.source(ins.operands[1], "b16"), DTYPES[to[:-2]]
        return lambda w: put(w, get(w).view(eight).astype(np.float32).astype(kind).view(np.uint32))
    kind, result = DTYPES[to.removesuffix("x2")], "b32"
    put, (high, low) = d.target(ins.operands[0], result), (d.source(operand, of) for operand in ins.operands[1:])

    def run(w: Warp) -> None:
        put(w, np.stack([low(w), high(w)], 1).astype(kind).view(np.uint32)[:, 0])

    return run


@op("ex2.approx.ftz.f32", "lg2.approx.ftz.f32")
def approximate(ins: Instruction, d: Decoder) -> Execute:
    """Base 2, with denormals as zero."""
    put, get, is_log = d.target(ins.operands[0], "f32"), d.source(ins.operands[1], "f32"), ins.parts[0] == "lg2"

    def run(w: Warp) -> None:
        x = _flushed(get(w))
        y, error = (np.log2 if is_log else np.exp2)(x, dtype=np.float64), _EX2_ERROR * _noise(w, get(w))
        y = y + error if is_log else y * (1 + error)
        put(w, _flushed(y).astype(np.float32))

    return run


def _flushed(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < _SMALLEST, np.copysign(0, x), x)


_SMALLEST = 2.0**-126


def _noise(w: Warp, values: np.ndarray) -> np.ndarray:
    """Between -1 and 1, and the same for the same value: warps that compute the same get the same."""
    bits = values.view(np.uint32) * np.uint32(2654435761) + np.uint32(w.block.machine.schedule.seed * 40503 + 1)
    return (bits * np.uint32(2246822519)).view(np.int32) / np.float64(1 << 31)


@op("div.full.f32")
def divide(ins: Instruction, d: Decoder) -> Execute:
    """With 2 ulp."""
    put, a, b = d.target(ins.operands[0], "f32"), d.source(ins.operands[1], "f32"), d.source(ins.operands[2], "f32")

    def run(w: Warp) -> None:
        y = a(w) / b(w)
        put(w, (y * (1 + _DIV_ERROR * _noise(w, y))).astype(np.float32))

    return run
