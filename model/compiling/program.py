"""A program before it is compiled: its function and the shapes and shardings of its arguments, and what decides its
trace."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import flax
import jax
import jaxlib
from jax import export

from pallas_kernels.cpu import library

# Custom calls of our kernels on GPUs and CPUs. `jax.export` does not promise that a later JAX runs them; the key holds
# the version of JAX.
_KERNEL_CALLS = ("mosaic_gpu_v2", "mosaic_gpu", *library.NAMES)
# Packages that compile or run a GPU's programs. Neither jax's nor jaxlib's version decides theirs.
CUDA_PACKAGES = ("jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc", "nvidia-cublas")
_NOT_OF_THE_TRACE = ("cache", "dump", "export", "logging", "traceback")  # parts of the names of JAX's options


@dataclass(frozen=True)
class Program:
    """A function to be compiled for given arguments.

    Args:
        function: (*arguments) -> a tree of arrays.
        arguments: trees of `jax.ShapeDtypeStruct` with shardings.
        donated: the indices of the arguments whose buffers the results reuse.
        out_shardings: one sharding for each array of the result: a tree of the result's structure.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donated: tuple[int, ...]
    out_shardings: Any

    @property
    def shapes(self) -> tuple[Any, ...]:
        """The shapes, types, shardings and devices that identify the program among those with the same name. They are
        the same for attached devices and for descriptions of them."""
        return *self.traced_shapes, tuple(device.id for device in self.devices())

    @property
    def traced_shapes(self) -> tuple[Any, ...]:
        """What identifies the trace, which is for any devices."""
        arguments = jax.tree.map(lambda x: (x.shape, x.dtype, _divided(x.sharding)), self.arguments)
        return arguments, self.donated, jax.tree.map(_divided, self.out_shardings)

    def devices(self) -> tuple[jax.Device, ...]:
        """The devices on which the program runs, in the order of its mesh."""
        sharding = jax.tree.leaves(self.arguments)[0].sharding
        if isinstance(sharding, jax.sharding.NamedSharding):
            return tuple(sharding.mesh.devices.flat)
        return tuple(sharding.device_set)

    def trace(self) -> jax.stages.Traced:
        """Traces the function. It is wrapped in a new function, because JAX keeps traces and executables by
        function."""

        @wraps(self.function)  # profiles and dumps show its name
        def function(*arguments: Any) -> Any:
            return self.function(*arguments)

        jitted = jax.jit(function, donate_argnums=self.donated, out_shardings=self.out_shardings)
        return jitted.trace(*self.arguments)

    def lower(self) -> jax.stages.Lowered:
        """The lowered program, which the compiler takes."""
        return self.trace().lower()

    def traced(self) -> export.Exported:
        """Traces the function with arguments and results as flat lists, because trees of our own types cannot be
        serialised."""
        leaves, structure = jax.tree.flatten(self.arguments)

        def flat(*leaves: jax.Array) -> list[jax.Array]:
            return jax.tree.leaves(self.function(*jax.tree.unflatten(structure, leaves)))

        jitted = jax.jit(flat, out_shardings=jax.tree.leaves(self.out_shardings))
        # The same JAX reads the program, so it need not be written for older ones.
        jax.config.update("jax_export_ignore_forward_compatibility", True)
        checks = [export.DisabledSafetyCheck.custom_call(name) for name in _KERNEL_CALLS]
        device = min(leaves[0].sharding.device_set, key=lambda device: device.id)
        platform = "cuda" if device.platform == "gpu" else device.platform  # what `jax.export` calls an NVIDIA GPU
        return export.export(jitted, platforms=[platform], disabled_checks=checks)(*leaves)

    def calling(self, exported: export.Exported) -> Program:
        """The same program, which calls the result of `traced` instead of its function."""

        @wraps(self.function)  # profiles and dumps show its name
        def call(*arguments: Any) -> Any:
            results = exported.call(*jax.tree.leaves(arguments))
            return jax.tree.unflatten(jax.tree.structure(self.out_shardings), results)

        return Program(call, self.arguments, self.donated, self.out_shardings)

    def as_read(self) -> Program:
        """The same program after it was stored and read again, as in a start from the disk."""
        return self.calling(export.deserialize(bytearray(self.traced().serialize())))


def _divided(sharding: jax.sharding.Sharding) -> str:
    """How an array is divided, without the devices. The `repr` of a mesh shows its axes."""
    return repr((sharding.mesh, sharding.spec)) if isinstance(sharding, jax.sharding.NamedSharding) else "whole"


def compiler_of(device: jax.Device) -> str:
    """The version of what traces and compiles for the device. Descriptions of a GPU have no runtime that would say
    it, so these are the versions of packages."""
    if device.platform == "gpu":
        return ", ".join(f"{name} {found.version}" for name in CUDA_PACKAGES for found in distributions(name=name))
    return " ".join(device.client.platform_version.split())


def fingerprint(packages: Iterable[Path], facts: Iterable[object], device: jax.Device) -> str:
    """A digest of all that decides how a program is traced.

    Args:
        packages: the folders of the Python packages whose code the programs run. Every .py and .json file counts.
        facts: the other inputs of the trace, such as the model's structure. The `repr` of each must show all its
            values.
        device: one of the devices for which the programs are.
    """
    digest = hashlib.sha256()
    for package in packages:
        for path in sorted(package.rglob("*")):
            if path.suffix in (".py", ".json"):
                digest.update(f"{path.relative_to(package.parent)} {path.stat().st_size}\n".encode())
                digest.update(path.read_bytes())
    options = {
        name: value for name, value in jax.config.values.items() if not any(part in name for part in _NOT_OF_THE_TRACE)
    }
    versions = (jax.__version__, jaxlib.__version__, flax.__version__)
    machine = (device.platform, device.device_kind, compiler_of(device))
    for fact in (versions, machine, sorted(options.items()), *facts):
        digest.update(f"{fact!r}\n".encode())
    return digest.hexdigest()[:32]
