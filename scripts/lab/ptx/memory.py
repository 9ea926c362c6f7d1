"""Arrays in the address spaces of a block. An address says which array it is in: each has a window of 2^40 bytes."""

from __future__ import annotations

from typing import Any

import numpy as np

from scripts.lab.ptx.hazards import Shadow
from scripts.lab.ptx.isa import Warp

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
        self.data = padded
        self.defined = np.full(len(padded), defined)
        self.shadow: Shadow | None = None
        self.writers: np.ndarray | None = None  # of global memory: block and warp that wrote a byte, 0 for none
        self.meta: Any = None  # what a tensor map describes
        self.inline = False  # whether its bytes are the parameter itself, and not its address

    @property
    def value(self) -> np.ndarray:
        """Its bytes, in the first shape and dtype."""
        return self.data[: self.size].view(self.dtype).reshape(self.shape)

    @property
    def written(self) -> np.ndarray:
        """Which elements are defined."""
        return self.defined[: self.size].reshape(-1, self.dtype.itemsize).all(1).reshape(self.shape)


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
        width = size * count
        found = np.full((32, width), POISON, np.uint8)
        for array, lanes, offsets in self.places(warp, addresses, width, space, "reads"):
            self.check_defined(warp, array, offsets, lanes)
            if array.shadow is not None:
                array.shadow.read(warp, offsets)
            elif array.writers is not None:
                self._report_others(warp, array, offsets, self._others(warp, array, offsets), "reads")
            found[lanes] = array.data[offsets]
        return found

    @staticmethod
    def check_defined(warp: Warp, array: Array, offsets: np.ndarray, lanes: np.ndarray | None = None) -> None:
        """Bytes that are read must have been written. `lanes`: those of the rows of `offsets`."""
        unwritten = ~array.defined[offsets]
        if unwritten.any():
            bad = () if lanes is None else lanes[unwritten.any(1)]
            where = f"reads {array.name} at byte {int(offsets[unwritten][0]):#x}, which was never written"
            warp.report("unwritten memory", where, bad)

    def store(self, warp: Warp, addresses: np.ndarray, values: np.ndarray, space: str) -> None:
        """Writes u8[32, bytes]."""
        for array, lanes, offsets in self.places(warp, addresses, values.shape[1], space, "writes"):
            self.write(warp, array, offsets, values[lanes])

    def write(self, warp: Warp, array: Array, offsets: np.ndarray, values: np.ndarray) -> None:
        """Writes bytes of an array through the generic proxy. The offsets must be in bounds."""
        if array.shadow is not None:
            array.shadow.write(warp, offsets)
        else:
            self.claim(warp, array, offsets, values)
        array.data[offsets] = values
        array.defined[offsets] = True

    def claim(self, warp: Warp, array: Array, offsets: np.ndarray, values: np.ndarray | None = None) -> None:
        """Notes that the warp writes bytes of global memory.

        Warps may write the same `values`: whichever comes last, it is the same (PTX ISA, "Data-races" of uniform size).
        """
        if not array.writable:
            warp.report("write to an input", f"writes {array.name} at byte {int(offsets.flat[0]):#x}")
        if array.writers is None:
            array.writers = np.zeros(len(array.data), np.int32)
        others = self._others(warp, array, offsets)
        if values is not None:
            others &= array.data[offsets] != values
        self._report_others(warp, array, offsets, others, "writes")
        array.writers[offsets] = warp.number

    @staticmethod
    def _others(warp: Warp, array: Array, offsets: np.ndarray) -> np.ndarray:
        """Which bytes another warp has written."""
        assert array.writers is not None
        writers = array.writers[offsets]
        return (writers != 0) & (writers != warp.number)

    @staticmethod
    def _report_others(warp: Warp, array: Array, offsets: np.ndarray, others: np.ndarray, does: str) -> None:
        if others.any():
            assert array.writers is not None
            byte = int(offsets[others][0])
            other = int(array.writers[byte]) - 1
            who = f"warp {other % 64} of block {other // 64}"
            warp.report("global race", f"{does} {array.name} at byte {byte:#x}, which {who} wrote")

    def places(
        self, warp: Warp, addresses: np.ndarray, width: int, space: str, does: str
    ) -> list[tuple[Array, np.ndarray, np.ndarray]]:
        """The arrays that the masked lanes address, their lanes, and the offsets of their bytes [lanes, width].

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
        if (starts & (width - 1)).any():
            bad = (starts & (width - 1)) != 0
            message = f"{does} {width} bytes of {array.name} at byte {int(starts[bad][0]):#x}"
            warp.report("misaligned", message, lanes[bad])
        if not len(lanes):
            return []
        return [(array, lanes, starts[:, None] + BYTES[:width])]


FULL = 0xFFFFFFFF
ALL_LANES = np.arange(32)
BYTES = np.arange(64)
