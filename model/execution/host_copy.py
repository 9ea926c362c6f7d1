"""Copies of the device's arrays in the host's memory, while the device uses their room for something else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import jax
import numpy as np
from jax.sharding import Sharding

Index = tuple[tuple[int, int, int], ...]  # (start, stop, step) of each axis


@dataclass(frozen=True)
class HostCopy:
    """The parts of one array that the devices of this process hold. A part that several devices hold is kept once.

    With several hosts, every process copies its own parts, because it cannot read those of others.
    """

    shape: tuple[int, ...]  # the shape of the whole array
    sharding: Sharding
    parts: dict[Index, np.ndarray]

    @classmethod
    def of(cls, array: jax.Array) -> Self:
        """Copies an array. The array stays on the devices."""
        # `np.asarray` of a CPU's array would share its memory. For other devices, JAX makes a copy.
        copied = np.array if next(iter(array.devices())).platform == "cpu" else np.asarray
        parts: dict[Index, np.ndarray] = {}
        for shard in array.addressable_shards:
            index = ranges(shard.index, array.shape)
            if index not in parts:
                parts[index] = copied(shard.data)
        return cls(array.shape, array.sharding, parts)

    def on_devices(self) -> jax.Array:
        """Copies the array back to the devices that held it."""

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            return self.parts[ranges(index, self.shape)]

        return jax.make_array_from_callback(self.shape, self.sharding, part)


def ranges(index: tuple[slice, ...], shape: tuple[int, ...]) -> Index:
    """The (start, stop, step) of each axis, which identify a part of an array of this shape."""
    return tuple(axis.indices(size) for axis, size in zip(index, shape, strict=True))
