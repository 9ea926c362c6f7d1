"""Arithmetic: integers, floating point, conversions, selections, and moves between registers.

Approximate instructions are as far off as the ISA allows, by an amount that the seed chooses (PTX ISA, "Floating-Point Instructions"):
ex2.approx.ftz 2^-22 of the result and lg2.approx.ftz 2^-22 (absolute between 1/2 and 2), div.full 2 ulp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from scripts.lab.ptx.decode import BANKS, BITS, DTYPES, Decoder, Execute, op
from scripts.lab.ptx.isa import Instruction, Register, Vector

if TYPE_CHECKING:
    from scripts.lab.ptx.machine import Warp

_MODIFIERS = {"rn", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi", "ftz", "sat", "satfinite", "lo", "approx", "full"}
_WIDER = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}
_EX2_ERROR, _DIV_ERROR = 2.0**-22, 2.0**-23


def _same_type(*names: str) -> Callable:
    """Registers an instruction whose operands have one type, the last part of the opcode."""

    def register(of: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
        def make(ins: Instruction, d: Decoder) -> Execute:
            dtype = ins.parts[-1]
            put = d.target(ins.operands[0], dtype)
            gets = [d.source(operand, dtype) for operand in ins.operands[1:]]
            if len(gets) == 1:
                (a,) = gets
                return lambda w: put(w, of(a(w)))
            if len(gets) == 2:
                a, b = gets
                return lambda w: put(w, of(a(w), b(w)))
            return lambda w: put(w, of(*(get(w) for get in gets)))

        op(*names)(make)
        return of

    return register


def _fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """In one rounding, up to those rare results that float64 rounds first."""
    if a.dtype == np.float32:
        return (a.astype(np.float64) * b + c).astype(np.float32)
    return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(a.dtype)


for _names, _of in {
    ("add.u16", "add.s16", "add.u32", "add.s32", "add.u64", "add.s64", "add.f32", "add.rn.f32"): np.add,
    ("sub.u16", "sub.s16", "sub.u32", "sub.s32", "sub.u64", "sub.s64", "sub.f32", "sub.rn.f32"): np.subtract,
    ("mul.lo", "mul.f32", "mul.rn.f32"): np.multiply,
    ("mad.lo",): lambda a, b, c: a * b + c,
    ("fma.rn.f32", "fma.rn.f16", "fma.rn.bf16"): _fused,
    ("neg",): np.negative,
    ("abs",): np.abs,
    ("not.b16", "not.b32", "not.b64", "not.pred"): np.invert,
    ("and",): np.bitwise_and,
    ("or",): np.bitwise_or,
    ("xor",): np.bitwise_xor,
    ("min.u16", "min.s16", "min.u32", "min.s32", "min.u64", "min.s64"): np.minimum,
    ("max.u16", "max.s16", "max.u32", "max.s32", "max.u64", "max.s64"): np.maximum,
    ("min.f32",): np.fmin,
    ("max.f32",): np.fmax,
    ("min.NaN.f32",): np.minimum,
    ("max.NaN.f32",): np.maximum,
}.items():
    _same_type(*_names)(_of)


@op("add.f32x2", "add.rn.f32x2", "sub.f32x2", "sub.rn.f32x2", "mul.f32x2", "mul.rn.f32x2", "fma.rn.f32x2")
def packed(ins: Instruction, d: Decoder) -> Execute:
    """Two float32 in a register of 64 bits."""
    of = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "fma": _fused}[ins.parts[0]]
    put = d.target(ins.operands[0], "b64")
    gets = [d.source(operand, "b64") for operand in ins.operands[1:]]

    def run(w: Warp) -> None:
        put(w, of(*(get(w).view(np.float32) for get in gets)).view(np.uint64))

    return run


@op("add.f16x2", "add.rn.f16x2", "sub.f16x2", "mul.f16x2", "mul.rn.f16x2", "fma.rn.f16x2")
@op("add.rn.bf16x2", "sub.rn.bf16x2", "mul.rn.bf16x2", "fma.rn.bf16x2", "mul.bf16x2")
def halves(ins: Instruction, d: Decoder) -> Execute:
    """Two 16-bit values in a register of 32 bits."""
    kind = DTYPES[ins.parts[-1].removesuffix("x2")]
    of = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "fma": _fused}[ins.parts[0]]
    put = d.target(ins.operands[0], "b32")
    gets = [d.source(operand, "b32") for operand in ins.operands[1:]]
    return lambda w: put(w, of(*(get(w).view(kind) for get in gets)).view(np.uint32))


@op("mul.wide", "mad.wide")
def wide(ins: Instruction, d: Decoder) -> Execute:
    """A product of twice the width."""
    narrow = ins.parts[-1]
    broad = _WIDER[narrow]
    put, kind = d.target(ins.operands[0], broad), DTYPES[broad]
    a, b = (d.source(operand, narrow) for operand in ins.operands[1:3])
    c = d.source(ins.operands[3], broad) if len(ins.operands) > 3 else None
    return lambda w: put(w, a(w).astype(kind) * b(w) + (c(w) if c else kind.type(0)))


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
    put, a, amount = d.target(ins.operands[0], dtype), d.source(ins.operands[1], dtype), d.source(ins.operands[2], "u32")
    if ins.parts[0] == "shl":
        return lambda w: put(w, np.where(amount(w) < bits, a(w) << np.minimum(amount(w), bits - 1).astype(kind), kind.type(0)))
    if dtype[0] == "s":
        return lambda w: put(w, a(w) >> np.minimum(amount(w), bits - 1).astype(kind))
    return lambda w: put(w, np.where(amount(w) < bits, a(w) >> np.minimum(amount(w), bits - 1).astype(kind), kind.type(0)))


@op("bfe")
def extract(ins: Instruction, d: Decoder) -> Execute:
    """Bits `[start, start + count)` of an operand, extended."""
    dtype = ins.parts[-1]
    bits, signed, wide_kind = int(dtype[1:]), dtype[0] == "s", np.int64
    put, a = d.target(ins.operands[0], dtype), d.source(ins.operands[1], dtype)
    start, count = (d.source(operand, "u32") for operand in ins.operands[2:])

    def run(w: Warp) -> None:
        at, n = (np.minimum(get(w) & 0xFF, bits).astype(wide_kind) for get in (start, count))
        n = np.minimum(n, bits - at) if not signed else n
        top = np.minimum(at + n, bits)
        values = a(w)
        if bits == 64:
            values = values >> at.astype(values.dtype)
            put(w, np.where(n < 64, values & ((np.uint64(1) << np.minimum(n, 63).astype(np.uint64)) - np.uint64(1)), values))
            return
        values = values.astype(wide_kind) << (64 - top)  # the field's highest bit is now the highest of 64
        if signed:
            put(w, np.where(n > 0, values >> np.minimum(64 - (top - at), 63), 0).astype(DTYPES[dtype]))
        else:
            found = values.view(np.uint64) >> np.minimum(64 - n, 63).astype(np.uint64)
            put(w, np.where(n > 0, found, 0).astype(DTYPES[dtype]))

    return run


@op("prmt.b32")
def permute(ins: Instruction, d: Decoder) -> Execute:
    """Bytes of two registers, chosen by four bits each; the highest bit of a choice repeats the byte's sign."""
    if ins.parts[2:]:
        raise NotImplementedError(ins.opcode)
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


_COMPARISONS: dict[str, Callable] = {
    "eq": np.equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
    "equ": lambda a, b: ~((a < b) | (a > b)), "neu": np.not_equal,
    "ltu": lambda a, b: ~(a >= b), "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b), "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: (a == a) & (b == b), "nan": lambda a, b: (a != a) | (b != b),
}  # fmt: skip


@op("setp")
def compare(ins: Instruction, d: Decoder) -> Execute:
    """A predicate. Comparisons of floats are false for NaN, except those whose names end in u."""
    name, dtype = ins.parts[1], ins.parts[-1]
    if set(ins.parts[2:-1]) - {"ftz"} or len(ins.operands) != 3:
        raise NotImplementedError(ins.text)
    put, a, b = d.target(ins.operands[0], "pred"), d.source(ins.operands[1], dtype), d.source(ins.operands[2], dtype)
    if name == "ne":
        if dtype[0] in "fb" and dtype != "b16" and dtype not in BANKS:  # ordered
            return lambda w: put(w, (a(w) < b(w)) | (a(w) > b(w)))
        return lambda w: put(w, a(w) != b(w))
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
    modifiers, to, of = set(ins.parts[1:-2]), ins.parts[-2], ins.parts[-1]
    if modifiers - _MODIFIERS:
        raise NotImplementedError(ins.opcode)
    if of.endswith("x2") or to.endswith("x2"):
        return _convert_pair(ins, d, to, of)
    put, get, kind = d.target(ins.operands[0], to), d.source(ins.operands[1], of), DTYPES[to]
    if of[0] in "us" and to[0] in "us":
        if "sat" in modifiers:
            low, high = np.iinfo(kind).min, np.iinfo(kind).max
            return lambda w: put(w, np.clip(get(w).astype(np.int64), low, high).astype(kind))
        return lambda w: put(w, get(w).astype(kind))
    if to[0] in "us":
        rounding = np.rint if "rni" in modifiers else np.trunc
        low, high = float(np.iinfo(kind).min), float(np.iinfo(kind).max)
        return lambda w: put(w, np.nan_to_num(np.clip(rounding(get(w).astype(np.float64)), low, high)).astype(kind))
    if "rz" in modifiers or "sat" in modifiers:
        raise NotImplementedError(ins.opcode)
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


@op("ex2.approx", "lg2.approx", "rcp.approx", "rsqrt.approx", "sqrt.approx")
def approximate(ins: Instruction, d: Decoder) -> Execute:
    """In float32, with denormals as zero under ftz."""
    of: Callable = {
        "ex2": np.exp2, "lg2": np.log2, "rcp": np.reciprocal, "rsqrt": lambda x: 1 / np.sqrt(x), "sqrt": np.sqrt,
    }[ins.parts[0]]  # fmt: skip
    put, get, flush, log = d.target(ins.operands[0], "f32"), d.source(ins.operands[1], "f32"), "ftz" in ins.parts, ins.parts[0] == "lg2"

    def run(w: Warp) -> None:
        x = get(w).astype(np.float64)
        if flush:
            x = np.where(np.abs(x) < _SMALLEST, np.copysign(0, x), x)
        error, y = _EX2_ERROR * _noise(w, get(w)), of(x)
        near = log & (x > 0.5) & (x < 2)
        y = np.where(near, y + error, y * (1 + error) if not log else np.where(np.isfinite(y), y * (1 + error), y))
        put(w, np.where(flush & (np.abs(y) < _SMALLEST), 0, y).astype(np.float32))

    return run


_SMALLEST = 2.0**-126


def _noise(w: Warp, values: np.ndarray) -> np.ndarray:
    """Between -1 and 1, and the same for the same value: warps that compute the same get the same."""
    bits = values.view(np.uint32) * np.uint32(2654435761) + np.uint32(w.block.machine.schedule.seed * 40503 + 1)
    return (bits * np.uint32(2246822519)).view(np.int32) / np.float64(1 << 31)


@op("div.full.f32", "div.approx.f32", "div.rn.f32")
def divide(ins: Instruction, d: Decoder) -> Execute:
    """With 2 ulp unless it is rounded."""
    exact = "rn" in ins.parts
    put, a, b = d.target(ins.operands[0], "f32"), d.source(ins.operands[1], "f32"), d.source(ins.operands[2], "f32")

    def run(w: Warp) -> None:
        y = a(w) / b(w)
        put(w, y if exact else (y * (1 + _DIV_ERROR * _noise(w, y))).astype(np.float32))

    return run
