"""Arrays that another process of a trainer gives, copied out of shared memory.

They go to this host's memory, not to a device: the chips hold the weights that serve, and the new ones go there layer
by layer. The giving side is `scripts.weight_sender`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from model.loading.remote_tensors import readable

SHARED_MEMORY = Path("/dev/shm")  # where Linux has the blocks of POSIX shared memory, as files
ALIGNMENT = 64  # bytes, of each array in a block
DTYPES = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in ("float32", "bfloat16", "float16")}


class Named(Protocol):
    """An array's name, the name of its dtype, and its shape."""

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


def received(source: Any) -> dict[str, np.ndarray]:
    """The arrays by their names. The memory of the giving process is not used any more.

    Args:
        source: the name of a `block` of shared memory of this machine, with `arrays` in this order, each a `Named`.

    Raises ValueError if an array is empty or has a type that is not read, or the block is missing or too small.
    """
    wrong = [f"{array.name} has type {array.dtype[:40]}" for array in source.arrays if array.dtype not in DTYPES]
    wrong += [f"{array.name} has no numbers" for array in source.arrays if 0 in array.shape]
    if wrong:
        raise ValueError(f"arrays must have numbers of one of {', '.join(DTYPES)}: {', '.join(wrong[:5])}")
    starts, size = places(source.arrays)
    name = source.block.lstrip("/")
    try:
        if Path(name).name != name:
            raise ValueError(f"{name[:80]!r} is a path")
        block = readable(SHARED_MEMORY / name)
        there = block.stat().st_size
    except (OSError, ValueError) as error:
        raise ValueError(f"there is no block {source.block[:80]!r} of shared memory on this machine") from error
    if there < size:
        raise ValueError(f"the block {source.block!r} has {there} bytes, and the arrays take {size}")
    copy = np.frombuffer(block.read_range(0, size), np.uint8)  # not mapped: its maker may make it shorter
    return {
        array.name: np.ndarray(array.shape, DTYPES[array.dtype], copy.data, start)
        for array, start in zip(source.arrays, starts, strict=True)
    }


def places(arrays: Sequence[Named]) -> tuple[list[int], int]:
    """Where each array begins in a block, and the bytes of the block."""
    return places_of((math.prod(array.shape) * DTYPES[array.dtype].itemsize for array in arrays), ALIGNMENT)


def places_of(sizes: Iterable[int], alignment: int) -> tuple[list[int], int]:
    """Where each of several parts begins, at a multiple of `alignment`, and the end of the last one, in bytes."""
    starts, end = [], 0
    for size in sizes:
        starts.append(-(-end // alignment) * alignment)
        end = starts[-1] + size
    return starts, end
