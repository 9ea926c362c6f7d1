"""Tensor maps, and copies by TMA between global and shared memory (PTX ISA, "Tensor Copy", "Swizzling Modes")."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from scripts.lab.ptx.decode import Decoder, Execute, Get, op
from scripts.lab.ptx.isa import Coordinates, Instruction, Warp
from scripts.lab.ptx.mbarrier import found_at, shared_address
from scripts.lab.ptx.memory import SHARED_BASE, Array
from scripts.lab.ptx.work import Groups, Work

# The numbers of Mosaic's runtime; 4-bit and smaller elements are not used.
ELEMENT_BYTES = {1: 1, 2: 2, 3: 4, 4: 8, 5: 2, 6: 4, 7: 2, 9: 4, 10: 8}
SWIZZLES = (16, 32, 64, 128)  # bytes; 16: none
MAX_BOX = 256
CHUNK = 16  # bytes that stay together under every swizzle
type Sizes = tuple[int, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class TensorMap:
    """What a host encodes in 128 bytes. Dimensions are in the order of the copy's coordinates: the innermost first."""

    array: Array
    offset: int  # bytes
    element: int  # bytes
    sizes: Sizes
    strides: Sizes  # bytes
    box: Sizes
    swizzle: int  # bytes

    @classmethod
    def encoded(
        cls, array: Array, offset: int, kind: int, sizes: Sizes, strides: Sizes, box: Sizes, *, swizzle: int
    ) -> TensorMap:
        """From the arguments of Mosaic's runtime: the outermost dimension first, strides in elements.

        Raises:
            ValueError: the driver would refuse it (CUDA driver API, cuTensorMapEncodeTiled).
        """
        element = ELEMENT_BYTES[kind]
        places = {"sizes": sizes[::-1], "strides": tuple(n * element for n in strides[::-1]), "box": box[::-1]}
        made = cls(array=array, offset=offset, element=element, swizzle=swizzle, **places)
        made.check()
        return made

    def check(self) -> None:
        """Raises ValueError for what the driver refuses."""
        inner = self.box[0] * self.element
        wrong = {
            "an address that is no multiple of 16": self.offset % 16,
            "1 to 5 dimensions": not 1 <= len(self.sizes) <= 5,
            "a stride that is no multiple of 16": any(stride % 16 for stride in self.strides[1:]),
            "an inner stride": self.strides[0] != self.element,
            "a box of more than 256": not all(1 <= n <= MAX_BOX for n in self.box),
            "inner bytes that are no multiple of 16": inner % 16,
            "an unknown swizzle": self.swizzle not in SWIZZLES,
            "a box wider than its swizzle": self.swizzle > 16 and inner > self.swizzle,
            "places beyond its array": self.offset + self.extent > self.array.size,
        }
        found = [words for words, is_wrong in wrong.items() if is_wrong]
        if found:
            raise ValueError(f"a tensor map of {self.array.name} has {', '.join(found)}: {self}")

    @property
    def extent(self) -> int:
        """The bytes from its first element to the end of its last."""
        return sum((n - 1) * stride for n, stride in zip(self.sizes, self.strides, strict=True)) + self.element

    @property
    def bytes(self) -> int:
        """Of a box: what a copy into shared memory adds to its mbarrier, also for what is out of bounds."""
        return int(np.prod(self.box)) * self.element

    @cached_property
    def places(self) -> np.ndarray:
        """Where a box's chunks of 16 bytes begin in it, [chunks, dimensions], in the order of shared memory."""
        of_chunk = CHUNK // self.element
        at = np.indices((*self.box[:0:-1], self.box[0] // of_chunk)).reshape(len(self.box), -1)[::-1].T
        return at * [of_chunk, *[1] * (len(self.box) - 1)]

    def starts(self, first: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where the chunks of the box at some coordinates begin in the array, and which are in bounds. Others are 0."""
        if first[0] * self.element % CHUNK:
            raise NotImplementedError(f"a box that begins within 16 bytes: {first}")
        at = self.places + first
        inside = ((at >= 0) & (at < self.sizes)).all(1)
        return self.offset + at @ np.array(self.strides), inside

    def shared_starts(self, start: int) -> np.ndarray:
        """Where the chunks begin in shared memory, for a box that is copied to an address there."""
        return swizzled(start + np.arange(0, self.bytes, CHUNK), self.swizzle) - SHARED_BASE


def swizzled(addresses: np.ndarray, swizzle: int) -> np.ndarray:
    """Moves 16-byte chunks within rows of `swizzle` bytes by the row's number: bits 4.. are XORed with bits 7.. of the
    address. PTX ISA, "Swizzling Modes"."""
    return addresses ^ ((addresses >> 7 & (swizzle // 16 - 1)) << 4)


def _map_of(w: Warp, address: int) -> TensorMap:
    array, offset = w.block.memory.find(address)
    return array.meta[offset]


def _operands(ins: Instruction, d: Decoder, operand: int) -> tuple[Get, list[Get]]:
    tensor = ins.operands[operand]
    assert isinstance(tensor, Coordinates), ins
    return d.address(tensor.base), [d.source(part, "s32") for part in tensor.parts]


def _box(w: Warp, tensor: TensorMap, place: int, first: np.ndarray, does: str) -> np.ndarray | None:
    """Where a box's chunks begin in shared memory. None if there is no such place."""
    if len(first) != len(tensor.box):
        w.report("tensor map", f"{len(first)} coordinates of a map of {tensor.array.name} with {len(tensor.box)}")
        return None
    if place % 128:
        w.report("misaligned", f"the box in shared memory begins at {place:#x}, which is no multiple of 128")
        return None
    chunks = tensor.shared_starts(place)
    if chunks.min() < 0 or chunks.max() + CHUNK > w.block.shared.size:
        w.report("out of bounds", f"the box of {tensor.bytes} bytes at {place:#x} is not in shared memory")
        return None
    if ((first < 0) | (first + tensor.box > tensor.sizes)).any():
        shape = f"{list(tensor.sizes)} of {tensor.array.name}"
        w.report("out of bounds", f"{does} a box {list(tensor.box)} at {first.tolist()} of a tensor {shape}")
    return chunks


@op("cp.async.bulk.tensor", writes=0)
def copy(ins: Instruction, d: Decoder) -> Execute:
    """A box between global and shared memory, for each lane of the mask."""
    if any(part.startswith(("im2col", "tile::", "multicast", "cta_group")) for part in ins.parts):
        raise NotImplementedError(ins.opcode)
    one = (_load if ins.parts[5].startswith("shared") else _store)(ins, d)

    def run(w: Warp) -> None:
        for lane in np.flatnonzero(w.mask):
            one(w, int(lane))

    return run


def _load(ins: Instruction, d: Decoder) -> Callable[[Warp, int], None]:
    place, barrier = d.address(ins.operands[0]), d.address(ins.operands[2])
    source, coordinates = _operands(ins, d, 1)

    def one(w: Warp, lane: int) -> None:
        tensor = _map_of(w, int(source(w)[lane]))
        first = np.array([int(get(w)[lane]) for get in coordinates])
        to = shared_address(w, int(place(w)[lane]))
        chunks = _box(w, tensor, to, first, "reads")
        here = found_at(w, shared_address(w, int(barrier(w)[lane])), by_copy=True)
        if chunks is None or here is None:
            return
        froms, inside = tensor.starts(first)
        w.block.memory.check_defined(w, tensor.array, froms[inside], CHUNK)
        shared, time = w.block.shared, here.phases + 1
        w.block.shadow.write_async(w, chunks, here.component, time)
        shared.define(chunks, CHUNK)

        def land() -> None:
            if here.phases >= time:
                w.now = w.program.code[ins.index]
                w.report(
                    "copy after its phase", f"a box of {tensor.bytes} bytes lands after the phase has ended: {here}"
                )
            values = np.zeros((len(chunks), CHUNK), np.uint8)
            values[inside] = tensor.array.get(froms[inside], CHUNK)
            shared.put(chunks, values)
            here.add_bytes(w, -tensor.bytes)

        what = f"a box of {tensor.array.name} at {first.tolist()}"
        w.block.launch(Work(ins, what, land, component=here.component, time=time))

    return one


def _store(ins: Instruction, d: Decoder) -> Callable[[Warp, int], None]:
    place = d.address(ins.operands[1])
    target, coordinates = _operands(ins, d, 0)

    def one(w: Warp, lane: int) -> None:
        tensor = _map_of(w, int(target(w)[lane]))
        first = np.array([int(get(w)[lane]) for get in coordinates])
        chunks = _box(w, tensor, shared_address(w, int(place(w)[lane])), first, "writes")
        if chunks is None:
            return
        groups, shared = Groups.of(w, "cp.async.bulk"), w.block.shared
        to, inside = tensor.starts(first)
        to, chunks = to[inside], chunks[inside]
        w.block.memory.check_defined(w, shared, chunks, CHUNK)
        w.block.shadow.read_async(w, chunks, groups.component, groups.committed + 1)
        w.block.memory.claim(w, tensor.array, to, shared.get(chunks, CHUNK))

        def land() -> None:
            tensor.array.put(to, shared.get(chunks, CHUNK))

        what = f"a box of {tensor.array.name} at {first.tolist()}"
        w.block.launch(Work(ins, what, land, component=groups.component, time=groups.committed + 1))

    return one
