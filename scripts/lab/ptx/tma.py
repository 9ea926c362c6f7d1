"""Tensor maps, and the copies by TMA between global and shared memory (PTX ISA, "Tensor Copy" and "Swizzling Modes")."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scripts.lab.ptx.memory import Array

# The numbers of Mosaic's runtime; 4-bit and smaller elements are not used.
ELEMENT_BYTES = {1: 1, 2: 2, 3: 4, 4: 8, 5: 2, 6: 4, 7: 2, 9: 4, 10: 8}
SWIZZLES = (16, 32, 64, 128)  # bytes; 16: none
MAX_BOX = 256


@dataclass(frozen=True, eq=False, kw_only=True)
class TensorMap:
    """What a host encodes in 128 bytes. Dimensions are in the order of the copy's coordinates: the innermost first."""

    array: Array
    offset: int  # bytes
    element: int  # bytes
    sizes: tuple[int, ...]
    strides: tuple[int, ...]  # bytes
    box: tuple[int, ...]
    swizzle: int  # bytes

    @classmethod
    def encoded(
        cls,
        array: Array,
        offset: int,
        kind: int,
        sizes: tuple[int, ...],
        strides: tuple[int, ...],
        box: tuple[int, ...],
        *,
        swizzle: int,
    ) -> TensorMap:
        """From the arguments of Mosaic's runtime: the outermost dimension first, strides in elements.

        Raises:
            ValueError: the driver would refuse it (CUDA driver API, cuTensorMapEncodeTiled).
        """
        element = ELEMENT_BYTES[kind]
        made = cls(
            array=array,
            offset=offset,
            element=element,
            sizes=sizes[::-1],
            strides=tuple(stride * element for stride in strides[::-1]),
            box=box[::-1],
            swizzle=swizzle,
        )
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
        }
        found = [words for words, is_wrong in wrong.items() if is_wrong]
        if found:
            raise ValueError(f"a tensor map of {self.array.name} has {', '.join(found)}: {self}")

    @property
    def bytes(self) -> int:
        """Of a box: what a copy into shared memory adds to its mbarrier, also for what is out of bounds."""
        return int(np.prod(self.box)) * self.element
