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
    """Where the rows of `count` matrices begin in shared memory; None if some may not be accessed."""
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
        starts = _rows(w, address(w), count, "reads")
        if starts is None:
            return
        shared = w.block.shared
        w.block.memory.check_defined(w, shared, starts, _ROW, np.arange(8 * count))
        w.block.shadow.read(w, starts, _ROW)
        values = shared.get(starts, _ROW).view(np.uint16).reshape(count, 8, 8)
        if transposed:
            values = np.ascontiguousarray(values.transpose(0, 2, 1))
        for put, matrix in zip(puts, values, strict=True):
            put(w, matrix.view(np.uint32).reshape(32))

    return run


@op("stmatrix.sync", writes=0)
def store(ins: Instruction, d: Decoder) -> Execute:
    """The reverse of ldmatrix."""
    count, transposed = _matrices(ins)
    address, registers = d.address(ins.operands[0]), d.places(ins.operands[1], count)

    def run(w: Warp) -> None:
        starts = _rows(w, address(w), count, "writes")
        if starts is None:
            return
        values = w.views.words[registers].view(np.uint16).reshape(count, 8, 8)
        if transposed:
            values = np.ascontiguousarray(values.transpose(0, 2, 1))
        w.block.memory.write(w, w.block.shared, starts, values.view(np.uint8).reshape(-1, _ROW))

    return run


# The order of A's values by rows, and of B's by columns, among the halves of their registers; and that of the
# registers' values in D.
_LEFT = np.arange(256).reshape(2, 2, 8, 4, 2).transpose(1, 2, 0, 3, 4).reshape(16, 16)
_RIGHT = np.arange(128).reshape(2, 8, 4, 2).transpose(0, 2, 3, 1).reshape(16, 8)
_RESULT = np.arange(128).reshape(2, 8, 4, 2).transpose(0, 3, 1, 2).reshape(4, 32)


@op("mma.sync.aligned.m16n8k16.row.col.f32")
def multiply(ins: Instruction, d: Decoder) -> Execute:
    """D = A B + C: 16 x 16 by 16 x 8, operands of 16 bits."""
    kind = ins.parts[-2]
    if kind not in ("f16", "bf16") or ins.parts[-3] != kind or ins.parts[-1] != "f32":
        raise NotImplementedError(ins.opcode)
    result, a, b, c = (d.places(operand, count) for operand, count in zip(ins.operands, (4, 4, 2, 4), strict=True))

    def widened(values: np.ndarray, order: np.ndarray) -> np.ndarray:
        halves = values.view(np.uint16).reshape(-1)[order]
        if kind == "f16":
            return halves.view(np.float16).astype(np.float32)
        return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)

    def run(w: Warp) -> None:
        w.expect(0xFFFFFFFF)
        words, floats = w.views.words, w.views.floats
        left, right = widened(words[a], _LEFT), widened(words[b], _RIGHT)
        product = left @ right
        if np.isnan(product).any():
            unknown = np.isnan(right).any(1)
            if unknown.any() and not left[:, unknown].any():
                w.block.machine.made_nan[ins] = None
        sums = floats[c] + product.reshape(-1)[_RESULT]
        floats[result] = sums if w.bits == 0xFFFFFFFF else np.where(w.mask, sums, floats[result])

    return run
