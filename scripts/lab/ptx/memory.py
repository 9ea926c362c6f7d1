"""Arrays in the address spaces of a block. An address says which array it is in: each has a window of 2^40 bytes."""

from __future__ import annotations

from typing import Any

import numpy as np

from scripts.lab.ptx.hazards import Shadow
from scripts.lab.ptx.isa import Instruction, Warp

WINDOW_BITS = 40
SHARED_WINDOW = 0x7F  # of generic addresses
SHARED_BASE = 1024  # where shared memory begins in its own space: the driver has the first KiB
POISON = 0xFF  # bytes of NaN in every floating-point format, and -1 or the largest index otherwise
_WINDOW = np.uint64(WINDOW_BITS)
MIDDLE = 1 << (WINDOW_BITS - 1)  # of a window, where its array begins: a negative offset does not leave it


class Array:
    """Bytes with a name: an argument of the kernel, or a block's shared memory.

    Args:
        data: what it holds at first. It is copied; `value` has the bytes after the run.
        defined: whether it may be read before it is written.
    """

    def __init__(self, name: str, data: np.ndarray, *, defined: bool = True, writable: bool = True) -> None:
        self.name, self.shape, self.dtype, self.writable = name, data.shape, data.dtype, writable
        self.size = data.nbytes
        self.base = 0  # of its addresses; given when the machine starts
        padded = np.full(-(-self.size // 16) * 16, POISON, np.uint8)
        if defined:
            padded[: self.size] = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        self.words = {size: padded.view(f"u{size}") for size in _WHOLE}  # what it holds
        self.is_whole = defined  # from the start
        marks = np.full(len(padded), defined)
        self.defined = {size: marks.view(f"u{size}") for size in _WHOLE}  # 1 in each byte that may be read
        self.shadow: Shadow | None = None
        self.writers = np.zeros(len(padded), np.int32)  # of global memory: block and warp that wrote a byte, 0: none
        self.written_by: dict[int, Instruction] = {}  # by its index
        self.meta: Any = None  # what a tensor map describes
        self.inline = False  # whether its bytes are the parameter itself, and not its address

    @property
    def value(self) -> np.ndarray:
        """Its bytes, in the first shape and dtype."""
        return self.words[1][: self.size].view(self.dtype).reshape(self.shape)

    def get(self, starts: np.ndarray, width: int) -> np.ndarray:
        """Bytes at multiples of their width, u8[starts, width]."""
        size, places = _words(starts, width)
        return self.words[size][places].view(np.uint8)

    def put(self, starts: np.ndarray, values: np.ndarray) -> None:
        """Writes u8[starts, width]."""
        size, places = _words(starts, values.shape[1])
        self.words[size][places] = values.view(f"u{size}")
        self.defined[size][places] = _WHOLE[size]

    def define(self, starts: np.ndarray, width: int) -> None:
        """Bytes that will be written may be read."""
        size, places = _words(starts, width)
        self.defined[size][places] = _WHOLE[size]


_WHOLE = {size: np.array(int.from_bytes(b"\1" * size), f"u{size}") for size in (1, 2, 4, 8)}  # words of defined bytes


def _words(starts: np.ndarray, width: int) -> tuple[int, np.ndarray]:
    """The size of the words that an access of this width has, and their numbers [starts, words]."""
    size = min(width, 8)
    return size, (starts >> size.bit_length() - 1)[:, None] + BYTES[: width // size]


class Memory:
    """What a block sees: arrays in global memory, and its shared memory."""

    def __init__(self, arrays: list[Array], shared: Array) -> None:
        self.windows = {array.base >> WINDOW_BITS: array for array in arrays}
        shared.base = SHARED_BASE
        self.shared = shared
        self.shared_generic = (SHARED_WINDOW << WINDOW_BITS) + SHARED_BASE

    def find(self, address: int) -> tuple[Array, int]:
        """The array of a generic address, and the offset in it. Neither bounds nor kind are checked.

        Raises:
            KeyError: the address is in no array's window.
        """
        window = address >> WINDOW_BITS
        if window == SHARED_WINDOW:
            return self.shared, address - self.shared_generic
        array = self.windows[window]
        return array, address - array.base

    def load(self, warp: Warp, addresses: np.ndarray, size: int, count: int, space: str) -> np.ndarray:
        """Each lane's bytes, u8[32, size * count]. What may not be read is poison."""
        width, found = size * count, None
        for array, lanes, starts in self.places(warp, addresses, width, space, "reads"):
            self.check_defined(warp, array, starts, width, lanes)
            if array.shadow is not None:
                array.shadow.read(warp, starts, width)
            elif array.written_by:
                self._report_others(warp, array, starts[:, None] + BYTES[:width], "reads")
            values = array.get(starts, width)
            if len(lanes) == len(ALL_LANES):
                return values
            found = np.full((32, width), POISON, np.uint8) if found is None else found
            found[lanes] = values
        return np.full((32, width), POISON, np.uint8) if found is None else found

    @staticmethod
    def check_defined(warp: Warp, array: Array, starts: np.ndarray, width: int, lanes: Any = ()) -> None:
        """Bytes that are read must have been written. `lanes`: those of the starts."""
        if array.is_whole:
            return
        size, places = _words(starts, width)
        bad = (array.defined[size][places] != _WHOLE[size]).any(1)
        if bad.any():
            offsets = (starts[bad, None] + BYTES[:width]).reshape(-1)
            byte = int(offsets[array.defined[1][offsets] == 0][0])
            where = f"reads {array.name} at byte {byte:#x}, which was never written"
            warp.report("unwritten memory", where, lanes[bad] if len(lanes) else ())

    def store(self, warp: Warp, addresses: np.ndarray, values: np.ndarray, space: str) -> None:
        """Writes u8[32, bytes]."""
        for array, lanes, starts in self.places(warp, addresses, values.shape[1], space, "writes"):
            self.write(warp, array, starts, values if len(lanes) == len(ALL_LANES) else values[lanes])

    def write(self, warp: Warp, array: Array, starts: np.ndarray, values: np.ndarray) -> None:
        """Writes bytes of an array through the generic proxy. The places must be in bounds."""
        if array.shadow is not None:
            array.shadow.write(warp, starts, values.shape[1])
        else:
            self.claim(warp, array, starts, values)
        array.put(starts, values)

    def claim(self, warp: Warp, array: Array, starts: np.ndarray, values: np.ndarray) -> None:
        """Notes that the warp writes bytes of global memory.

        Warps may write the same values: whichever comes last, it is the same (PTX ISA, "Data-races" of uniform size).
        """
        if not array.writable:
            warp.report("write to an input", f"writes {array.name} at byte {int(starts[0]):#x}")
        array.written_by[warp.now.ins.index] = warp.now.ins
        offsets = starts[:, None] + BYTES[: values.shape[1]]
        self._report_others(warp, array, offsets[array.words[1][offsets] != values], "writes")
        array.writers[offsets] = warp.number

    @staticmethod
    def _report_others(warp: Warp, array: Array, offsets: np.ndarray, does: str) -> None:
        """Reports bytes that another warp has written."""
        others = (array.writers[offsets] != 0) & (array.writers[offsets] != warp.number)
        if others.any():
            byte = int(offsets[others][0])
            other = int(array.writers[byte]) - 1
            who = f"warp {other % 64} of block {other // 64}"
            warp.report("global race", f"{does} {array.name} at byte {byte:#x}, which {who} wrote")

    def places(
        self, warp: Warp, addresses: np.ndarray, width: int, space: str, does: str
    ) -> list[tuple[Array, np.ndarray, np.ndarray]]:
        """The arrays that the masked lanes address, their lanes, and where each lane's bytes begin.

        Lanes out of bounds, or not aligned to the width, are reported and left out.
        """
        lanes = ALL_LANES if warp.bits == FULL else np.flatnonzero(warp.mask)
        mine = addresses if lanes is ALL_LANES else addresses[lanes]
        if space == "shared":
            return self.in_array(warp, self.shared, lanes, mine.astype(np.int64) - SHARED_BASE, width, does)
        windows = (mine >> _WINDOW).astype(np.int64)
        first = int(windows[0])
        chosen = [first] if (windows == first).all() else np.unique(windows).tolist()
        found = []
        for window in chosen:
            here = slice(None) if len(chosen) == 1 else windows == window
            array = self.windows.get(window)
            if window == SHARED_WINDOW and space == "generic":
                array = self.shared
            if array is None:
                where = f"{does} at {int(mine[here][0]):#x}, which is in no array of the kernel's arguments"
                warp.report("out of bounds", where, lanes[here])
                continue
            base = self.shared_generic if array is self.shared else array.base
            offsets = mine[here].astype(np.int64) - base
            found += self.in_array(warp, array, lanes[here], offsets, width, does)
        return found

    def in_array(
        self, warp: Warp, array: Array, lanes: np.ndarray, starts: np.ndarray, width: int, does: str
    ) -> list[tuple[Array, np.ndarray, np.ndarray]]:
        """As `places`, for offsets in one array."""
        outside = (starts < 0) | (starts > array.size - width)
        if outside.any():
            offset = int(starts[outside][0])
            shape = f"{array.dtype}{list(array.shape)}, {array.size} bytes"
            warp.report("out of bounds", f"{does} {array.name} ({shape}) at byte {offset}", lanes[outside])
            lanes, starts = lanes[~outside], starts[~outside]
        within = starts & (width - 1)
        if within.any():
            bad = within != 0
            message = f"{does} {width} bytes of {array.name} at byte {int(starts[bad][0]):#x}"
            warp.report("misaligned", message, lanes[bad])
            lanes, starts = lanes[~bad], starts[~bad]
        return [(array, lanes, starts)] if len(lanes) else []


FULL = 0xFFFFFFFF
ALL_LANES = np.arange(32)
BYTES = np.arange(64)
