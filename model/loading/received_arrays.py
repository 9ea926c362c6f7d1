"""Arrays that another process of a trainer gives: copied out of shared memory, or pulled over the network.

Both ways end in this host's memory, never on a device: the chips hold the weights that serve, and the new ones go there
layer by layer. The giving side is `scripts.weight_sender`.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import ml_dtypes
import numpy as np
from jax.sharding import SingleDeviceSharding

from model.inputs.words import one_line
from model.loading.remote_tensors import readable

SHARED_MEMORY = Path("/dev/shm")  # where Linux has the blocks of POSIX shared memory, as files
ALIGNMENT = 64  # bytes, of each array in a block
CONNECT_TIMEOUT_S = 10.0
LOOK_S = 0.002  # between looks whether all has come
PULL_TIMEOUT_S = 120.0
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
        source: of `arrays`, each a `Named`, in this order: a `block` of shared memory of this machine, or what a
            transfer server at an `address` gives for one pull by a `uuid`.

    Raises ValueError if an array is empty or has a type that is not read, or the block is missing or too small. Raises
    OSError if the transfer server does not give them in time.
    """
    wrong = [f"{array.name} has type {array.dtype[:40]}" for array in source.arrays if array.dtype not in DTYPES]
    wrong += [f"{array.name} has no numbers" for array in source.arrays if 0 in array.shape]
    if wrong:
        raise ValueError(f"arrays must have numbers of one of {', '.join(DTYPES)}: {', '.join(wrong[:5])}")
    return _copied(source) if hasattr(source, "block") else _pulled(source)


def places(arrays: Sequence[Named]) -> tuple[list[int], int]:
    """Where each array begins in a block, and the bytes of the block."""
    starts, end = [], 0
    for array in arrays:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        starts.append(start)
        end = start + math.prod(array.shape) * DTYPES[array.dtype].itemsize
    return starts, end


def _copied(source: Any) -> dict[str, np.ndarray]:
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


def _pulled(source: Any) -> dict[str, np.ndarray]:
    from jax.experimental import transfer

    try:
        device = jax.devices("cpu")[0]
        sharding = SingleDeviceSharding(device)
        shapes = [jax.ShapeDtypeStruct(array.shape, DTYPES[array.dtype], sharding=sharding) for array in source.arrays]
        own = _address_towards(source.address)
        server = transfer.start_transfer_server(device.client, own, [own])
        connection = server.connect(source.address)
        arrays = connection.pull(source.uuid, shapes)
        try:
            _wait_for(arrays)
        except TimeoutError:
            connection._poison_connection()  # nothing else ends a pull, which holds the memory of its arrays
            raise
        values = [np.asarray(array) for array in arrays]
    except (OSError, RuntimeError, ValueError) as error:  # it is not there, does not offer them, or has ended
        reason = one_line(str(error))[:200]
        raise OSError(f"no arrays came from {source.address[:80]!r}, uuid {source.uuid}: {reason}") from error
    return {array.name: value for array, value in zip(source.arrays, values, strict=True)}


def _wait_for(arrays: Sequence[jax.Array]) -> None:
    """Waits for all arrays. JAX has no time limit for those that nobody offers. Raises TimeoutError after
    PULL_TIMEOUT_S."""
    deadline = time.monotonic() + PULL_TIMEOUT_S
    while not all(array.is_ready() for array in arrays):  # type: ignore[attr-defined]
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing has come for {PULL_TIMEOUT_S:g} s")
        time.sleep(LOOK_S)


def _address_towards(peer: str) -> str:
    """The address at which this machine is reached from there, with any free port. OSError if nothing listens there."""
    host, _, port = peer.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S) as connection:
        own = connection.getsockname()[0]
    return f"[{own}]:0" if ":" in own else f"{own}:0"
