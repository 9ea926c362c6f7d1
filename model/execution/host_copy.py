"""Copies of the device's arrays in the host's memory, while the device uses their room for something else."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

DEVICE, HOST = "device", "pinned_host"  # JAX's names of a device's own memory, and of memory that it copies from itself


def copied(array: jax.Array, memory: str, *, shares: bool = False) -> jax.Array:
    """Starts a copy of the array to the other memory of its devices. With several hosts, every process copies the parts
    of its own devices. `jax.device_put` of the whole array would compile a program for all hosts.

    Raises JaxRuntimeError if there is no room.

    Args:
        memory: DEVICE or HOST.
        shares: a CPU copies nothing, because its memory is the host's: both arrays have the same bytes. Each can be
            deleted, but as long as the new one is there, so is the old object.
    """
    parts = [
        jax.device_put(
            np.asarray(shard.data) if shares and shard.device.platform == "cpu" else shard.data,
            SingleDeviceSharding(shard.device, memory_kind=memory),
        )
        for shard in array.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding.with_memory_kind(memory), parts)
