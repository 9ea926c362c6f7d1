"""Arrays of the device in the host's memory, while the device needs their room for something else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import jax
import numpy as np
from jax.sharding import Sharding

Index = tuple[tuple[int, int, int], ...]  # (start, stop, step) of each axis


@dataclass(frozen=True)
class HostCopy:
    """What this process's devices hold of one array. A part that several of them hold is kept once.

    With several hosts every process copies its own parts: none can read those of the others.
    """

    shape: tuple[int, ...]  # of the whole array
    sharding: Sharding
    parts: dict[Index, np.ndarray]

    @classmethod
    def of(cls, array: jax.Array) -> Self:
        """A copy; the array stays as it is."""
        # A CPU's arrays are the host's memory, which must not be held. Those of others JAX has copied already.
        copied = np.array if next(iter(array.devices())).platform == "cpu" else np.asarray
        parts: dict[Index, np.ndarray] = {}
        for shard in array.addressable_shards:
            index = ranges(shard.index, array.shape)
            if index not in parts:
                parts[index] = copied(shard.data)
        return cls(array.shape, array.sharding, parts)

    def on_devices(self) -> jax.Array:
        """The array again, on the devices that held it."""

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            return self.parts[ranges(index, self.shape)]

        return jax.make_array_from_callback(self.shape, self.sharding, part)


def ranges(index: tuple[slice, ...], shape: tuple[int, ...]) -> Index:
    """What identifies a part of an array of this shape."""
    return tuple(axis.indices(size) for axis, size in zip(index, shape, strict=True))
