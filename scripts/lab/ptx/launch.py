"""Kernels of a step for a GPU that is not here: their PTX, and how Mosaic's host code launches them on given arrays.

The step runs on the CPU as it is written. Where it calls a kernel, the kernel is compiled for the target, and `execute`
takes the place of the chip.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import core
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.gpu import combine, decode, device, prefill_hopper, prefill_mma
from pallas_kernels.gpu.prefill_body import PrefillOperands
from scripts.lab.accounts import gpu_report
from scripts.lab.accounts.targets import GpuTarget
from scripts.lab.ptx import host
from scripts.lab.ptx.isa import Kernel
from scripts.lab.ptx.machine import Launch
from scripts.lab.ptx.memory import Array
from scripts.lab.ptx.parse import parse

_HOST_BEGINS = "; ModuleID = "
_OPERANDS = {
    "paged_decode": decode.Operands._fields,
    "paged_prefill": PrefillOperands._fields,
    "paged_prefill_mma": PrefillOperands._fields,
    "paged_combine": ("results", "sums", "merges", "num_merges") * 2,
}


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A kernel and the host's program that launches it."""

    kernel: Kernel
    ptx: str = field(repr=False)
    host_program: str = field(repr=False)
    aliases: dict[int, int]  # operands that are written in place: the number among the outputs


@dataclass(frozen=True, kw_only=True)
class KernelCall:
    """One call of a kernel, with its arrays."""

    name: str
    compiled: Compiled
    operands: list[tuple[str, np.ndarray]]
    outputs: list[jax.ShapeDtypeStruct]  # all, also those in the place of operands

    def launch(self) -> tuple[Launch, list[Array]]:
        """A launch with arrays of its own, and the outputs among them."""
        aliases = self.compiled.aliases
        arrays = [Array(name, data, writable=i in aliases) for i, (name, data) in enumerate(self.operands)]
        outputs = [
            Array(f"output {i}", np.zeros(out.shape, out.dtype), defined=False) for i, out in enumerate(self.outputs)
        ]
        for operand, output in aliases.items():
            outputs[output] = arrays[operand]
        return host.run(self.compiled.host_program, self.compiled.kernel, [*arrays, *outputs]), outputs


@contextlib.contextmanager
def executed(target: GpuTarget, gpu: device.Gpu, execute: Callable[[KernelCall], list[np.ndarray]]) -> Iterator[None]:
    """Steps in this context run with the kernels of `target`, which `execute` runs; it returns all outputs.

    Args:
        gpu: the chip as the kernels' tiles and grids are chosen for, with fewer multiprocessors for a small grid.
    """
    make = plgpu.kernel

    def kernel(body: Any, *, out_type: Any, kernel_name: str, interpret: Any, **options: Any) -> Any:
        assert interpret is None
        call = make(body, out_type=out_type, kernel_name=kernel_name, **options)

        def run(*operands: Any) -> tuple[jax.Array, ...]:
            refs = [i for i, operand in enumerate(operands) if isinstance(operand, jax.Ref)]
            arrays = [np.asarray(x[...] if i in refs else x) for i, x in enumerate(operands)]
            compiled = compile_kernel(target, call, arrays, refs)
            names = [*_OPERANDS[kernel_name][: len(arrays) - len(refs)], *["output"] * len(refs)]
            in_place = [jax.ShapeDtypeStruct(arrays[i].shape, arrays[i].dtype) for i in compiled.aliases]
            found = execute(
                KernelCall(
                    name=kernel_name,
                    compiled=compiled,
                    operands=list(zip(names, arrays, strict=True)),
                    outputs=[*out_type, *in_place],
                )
            )
            for i, output in compiled.aliases.items():
                operands[i][...] = jnp.asarray(found[output])
            return tuple(jnp.asarray(x) for x in found[: len(out_type)])

        return run

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(device, "current", return_value=gpu))
        for module in (decode, prefill_mma, prefill_hopper, combine):  # a test may have given each its own plgpu
            patches.enter_context(mock.patch.object(module.plgpu, "kernel", kernel))
        yield


def compile_kernel(target: GpuTarget, call: Callable[..., Any], arrays: list[np.ndarray], refs: list[int]) -> Compiled:
    """Compiles a kernel alone. A process must compile for one target only.

    Args:
        refs: the operands that it takes as Refs.
    """
    mesh = Mesh(np.array(target.devices()), ("tensor",))
    aliases: list[dict[int, int]] = []
    lower = core._mosaic_gpu_lowering_rule

    def lowering(*args: Any, input_output_aliases: Any, **options: Any) -> Any:
        aliases.append(dict(input_output_aliases))
        return lower(*args, input_output_aliases=input_output_aliases, **options)

    def program(*operands: jax.Array) -> Any:
        places = {i: jax.new_ref(operands[i]) for i in refs}
        outputs = call(*(places.get(i, operand) for i, operand in enumerate(operands)))
        return outputs, [jax.freeze(place) for place in places.values()]

    abstract = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P())) for x in arrays]
    with target.compiling(mesh), mock.patch.object(core, "_mosaic_gpu_lowering_rule", lowering):
        _, said = gpu_report.heard(lambda: jax.jit(program).lower(*abstract).compile(), "PTX", "HOST_LLVM")
    ptx, _, program_of_host = said.partition(_HOST_BEGINS)
    assert len(aliases) == 1, aliases
    return Compiled(kernel=parse(ptx), ptx=ptx, host_program=program_of_host, aliases=aliases[0])
