"""Chips that are not attached, as the devices of a process that traces or compiles programs for them."""

from __future__ import annotations

import os
from typing import Any

from scripts.building.gpu_topology import GpuTopology, gpu_topology
from scripts.building.tpu_topology import TpuTopology, tpu_topology

_MORE_THAN_OURS = 1000  # the priority of a backend; that of an attached TPU is 300


def topology_named(name: str) -> TpuTopology | GpuTopology:
    """The chips of a target: v6e:2x4, h100, 8xh200. Raises ValueError for another name."""
    return tpu_topology(name) if ":" in name else gpu_topology(name)


def be_on(topology: TpuTopology | GpuTopology) -> None:
    """Makes described chips the devices of this process, so `jax.devices()` are descriptions. Programs can be traced
    and compiled for them, but nothing can be run or allocated. Call it before jax is imported.

    Raises:
        ValueError: the chips are on several hosts, or their compiler is missing or does not know them.
    """
    topology.check()
    os.environ |= topology.environment
    from jax._src import hardware_utils, xla_bridge  # private: JAX has no public API for described devices

    try:
        client: Any = topology.devices()[0].client
    except (RuntimeError, NotImplementedError) as error:
        plugin = {"tpu": "libtpu", "cuda": "the CUDA plug-in"}[topology.backend]
        raise ValueError(f"--target {topology.name}: {plugin} cannot compile for it here: {error}") from error
    type(client).serialize_with_sdy = True  # `jax.export` asks the client, and those of attached devices say so
    hardware_utils.has_visible_nvidia_gpu = lambda: topology.backend == "cuda"
    xla_bridge.register_backend_factory(topology.backend, lambda: client, priority=_MORE_THAN_OURS)


def is_described(backend: str) -> bool:
    """Whether `be_on` has made described chips the devices of this backend of jax."""
    from jax._src import xla_bridge

    registered = xla_bridge._backend_factories.get(backend)
    return registered is not None and registered.priority == _MORE_THAN_OURS
