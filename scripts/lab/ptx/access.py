"""Loads and stores of single lanes."""

from __future__ import annotations

import numpy as np

from scripts.lab.ptx.decode import BITS, DTYPES, Decoder, Execute, op
from scripts.lab.ptx.isa import Address, Instruction, Symbol, Warp

_VECTORS = {"v2": 2, "v4": 4, "v8": 8}


def _form(ins: Instruction) -> tuple[str, int, str]:
    """The space, the elements and the type of an access."""
    parts = [part.partition("::")[0] for part in ins.parts[1:]]
    space = next((part for part in parts if part in ("global", "shared")), "generic")
    return space, next((_VECTORS[part] for part in parts if part in _VECTORS), 1), parts[-1]


@op("ld")
def load(ins: Instruction, d: Decoder) -> Execute:
    """Each lane loads one value, or the parts of a vector."""
    space, count, dtype = _form(ins)
    size = DTYPES[dtype].itemsize
    puts, address = d.targets(ins.operands[0], dtype), d.address(ins.operands[1])

    def run(w: Warp) -> None:
        values = w.block.memory.load(w, address(w), size, count, space).view(DTYPES[dtype])
        for i, put in enumerate(puts):
            put(w, values[:, i])

    return run


@op("ld.param", "ld.param::entry")
def load_parameter(ins: Instruction, d: Decoder) -> Execute:
    """An argument of the kernel."""
    target, source = ins.operands
    assert isinstance(source, Address) and isinstance(source.base, Symbol), ins
    puts, dtype, size = d.targets(target, ins.parts[-1]), DTYPES[ins.parts[-1]], DTYPES[ins.parts[-1]].itemsize
    name, start = source.base.name, source.offset

    def run(w: Warp) -> None:
        data = w.program.parameter(name)[start : start + size * len(puts)]
        for put, value in zip(puts, np.frombuffer(data, dtype), strict=True):
            put(w, np.full(32, value))

    return run


@op("st", writes=0)
def store(ins: Instruction, d: Decoder) -> Execute:
    """Each lane stores one value, or the parts of a vector."""
    space, _, dtype = _form(ins)
    bits = BITS[DTYPES[dtype].itemsize]
    address, gets = d.address(ins.operands[0]), d.sources(ins.operands[1], dtype)

    def run(w: Warp) -> None:
        values = np.empty((32, len(gets)), bits)
        for i, get in enumerate(gets):
            values[:, i] = get(w).view(bits)
        w.block.memory.store(w, address(w), values.view(np.uint8), space)

    return run
