"""Matrices in the registers of a warp: ldmatrix, stmatrix, and the products of mma.sync.

Fragments as in the PTX ISA, "Matrix Fragments for mma.m16n8k16": lane 4 * g + t has two neighbouring values of row g,
from column 2 * t. Products are exact, and summed in float32 in an order of the machine's choice.
"""

from __future__ import annotations

import numpy as np

from scripts.lab.ptx.decode import Decoder, Execute, op
from scripts.lab.ptx.isa import Instruction, Warp
from scripts.lab.ptx.memory import SHARED_BASE

_ROW = 16  # bytes of a row of 8 values
_MATRICES = {"x1": 1, "x2": 2, "x4": 4}


def _rows(w: Warp, addresses: np.ndarray, count: int, does: str) -> np.ndarray | None:
    """The offsets in shared memory of `count` matrices' rows, [count * 8, 16]; None if some may not be accessed."""
    w.expect(0xFFFFFFFF)
    lanes, starts = np.arange(8 * count), addresses[: 8 * count].astype(np.int64) - SHARED_BASE
    found = w.block.memory.in_array(w, w.block.shared, lanes, starts, _ROW, does)
    return found[0][2] if found and len(found[0][1]) == len(lanes) else None


def _matrices(ins: Instruction) -> tuple[int, bool]:
    if "m8n8" not in ins.parts or ins.parts[-1] != "b16":
        raise NotImplementedError(ins.opcode)
    return next(_MATRICES[part] for part in ins.parts if part in _MATRICES), "trans" in ins.parts


@op("ldmatrix.sync")
def load(ins: Instruction, d: Decoder) -> Execute:
    """Matrices of 8 x 8 values of 16 bits. Lane i has the address of row i % 8 of matrix i / 8."""
    count, transposed = _matrices(ins)
    puts, address = d.targets(ins.operands[0], "b32"), d.address(ins.operands[1])

    def run(w: Warp) -> None:
        offsets = _rows(w, address(w), count, "reads")
        if offsets is None:
            return
        shared = w.block.shared
        w.block.memory.check_defined(w, shared, offsets, np.arange(8 * count))
        assert shared.shadow is not None
        shared.shadow.read(w, offsets)
        values = shared.data[offsets].view(np.uint16).reshape(count, 8, 8)
        if transposed:
            values = np.ascontiguousarray(values.transpose(0, 2, 1))
        for put, matrix in zip(puts, values, strict=True):
            put(w, matrix.view(np.uint32).reshape(32))

    return run


@op("stmatrix.sync", writes=0)
def store(ins: Instruction, d: Decoder) -> Execute:
    """The reverse of ldmatrix."""
    count, transposed = _matrices(ins)
    address, gets = d.address(ins.operands[0]), d.sources(ins.operands[1], "b32")

    def run(w: Warp) -> None:
        offsets = _rows(w, address(w), count, "writes")
        if offsets is None:
            return
        values = np.stack([get(w) for get in gets]).view(np.uint16).reshape(count, 8, 8)
        if transposed:
            values = np.ascontiguousarray(values.transpose(0, 2, 1))
        w.block.memory.write(w, w.block.shared, offsets, values.view(np.uint8).reshape(-1, _ROW))

    return run


@op("mma.sync.aligned.m16n8k16.row.col.f32")
def multiply(ins: Instruction, d: Decoder) -> Execute:
    """D = A B + C: 16 x 16 by 16 x 8, operands of 16 bits."""
    kind = ins.parts[-2]
    if kind not in ("f16", "bf16") or ins.parts[-3] != kind or ins.parts[-1] != "f32":
        raise NotImplementedError(ins.opcode)
    puts = d.targets(ins.operands[0], "f32")
    a, b = (d.sources(operand, "b32") for operand in ins.operands[1:3])
    c = d.sources(ins.operands[3], "f32")

    def widened(w: Warp, gets: list) -> np.ndarray:
        values = np.stack([get(w) for get in gets])
        if kind == "f16":
            return values.view(np.float16).astype(np.float32)
        pairs = np.stack([values << np.uint32(16), values & np.uint32(0xFFFF0000)], -1)
        return pairs.view(np.float32)

    def run(w: Warp) -> None:
        w.expect(0xFFFFFFFF)
        left = widened(w, a).reshape(2, 2, 8, 4, 2).transpose(1, 2, 0, 3, 4).reshape(16, 16)
        right = widened(w, b).reshape(2, 8, 4, 2).transpose(0, 2, 3, 1).reshape(16, 8)
        unknown = np.isnan(right).any(1)
        if unknown.any() and not left[:, unknown].any():
            w.block.machine.made_nan[ins] = None
        product = (left @ right).reshape(2, 8, 4, 2).transpose(0, 3, 1, 2).reshape(4, 32)
        sums = [get(w) + part for get, part in zip(c, product, strict=True)]
        for put, values in zip(puts, sums, strict=True):
            put(w, values)

    return run
