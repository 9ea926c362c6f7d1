"""Finds quantised weights that a compiled program writes out in a wider type.

XLA converts a kernel of 8 or 4 bits inside a product if the chip and the compiler can do this. Otherwise it writes the
whole kernel in a wider type at every step, which takes more time than weights that are not quantised.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from flax import nnx
from jax.sharding import Mesh

from model.network import cpu_products
from model.network.linear import Linear
from model.network.llama import Llama
from model.quantization.forms import FourBit

WIDE_BYTES = {"s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f32": 4}
# The results of these instructions are no new memory.
_ALIASES = {"parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call", "opt-barrier"}
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (.*?) ([\w\-]+)\(")
_ARRAY = re.compile(r"(\w+)\[([\d,]+)\]")
_FUSED = re.compile(r" fusion\(.*?calls=%?([\w.\-]+)")

Shape = tuple[int, ...]


class Quantized(NamedTuple):
    """A quantised kernel."""

    name: str  # the path of a parameter of this shape
    bits: int = 8


def quantized_kernels(model: Llama, platform: str, mesh: Mesh | None) -> dict[Shape, Quantized]:
    """The quantised kernels of which no program may write a dequantised copy, by their shapes on one device. A shape is
    sorted and has no ones. A 4-bit kernel has a second shape, which is cut into groups.

    On a CPU, small kernels, 4-bit kernels and all kernels in a mesh are converted whole, so they are left out.
    """
    if platform == "cpu" and mesh is not None:
        return {}
    min_weights = cpu_products.BLOCK_WEIGHTS if platform == "cpu" else 0
    kernels: dict[Shape, Quantized] = {}
    for path, module in nnx.iter_graph(model):
        if not isinstance(module, Linear) or (form := module.method.form) is None:
            continue
        kernel = module.kernel.get_value()
        if kernel.ndim != 2:  # it is packed
            continue
        shape = kernel.sharding.shard_shape(kernel.shape)
        if platform == "cpu" and (form.bits < 8 or math.prod(shape) <= min_weights):
            continue
        name = ".".join(map(str, (*path, "kernel")))
        for written in _written(shape, module):
            kernels.setdefault(_normal(written), Quantized(name, form.bits))
    return kernels


def told_apart(kernels: Mapping[Shape, Quantized], num_tokens: int, num_rows: int) -> dict[Shape, Quantized]:
    """The kernels whose shapes cannot be those of a product's output. An output can have the shape of a kernel if the
    number of tokens or rows is a size of the kernel."""
    return {shape: kernel for shape, kernel in kernels.items() if num_tokens not in shape and num_rows not in shape}


def find(text: str, kernels: Mapping[Shape, Quantized]) -> dict[str, int]:
    """The arrays in an optimised program that have a kernel's shape and a wider type: `name: type[shape]` -> bytes.
    Values inside a fusion are not written to memory and do not count."""
    fused = set(_FUSED.findall(text))
    found: dict[str, int] = {}
    computation = ""
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            computation = match[1]
            continue
        instruction = _INSTRUCTION.match(line)
        if instruction is None or instruction[2] in _ALIASES or computation in fused:
            continue
        for dtype, sizes in _ARRAY.findall(instruction[1]):
            shape = tuple(int(size) for size in sizes.split(","))
            kernel = kernels.get(_normal(shape))
            if kernel is not None and 8 * WIDE_BYTES.get(dtype, 0) > kernel.bits:
                found[f"{kernel.name}: {dtype}[{sizes}]"] = math.prod(shape) * WIDE_BYTES[dtype]
    return found


def _written(shape: Shape, linear: Linear) -> tuple[Shape, ...]:
    """The shapes in which a program could write a kernel of this shape: whole, and cut into groups."""
    form, (num_out, width) = linear.method.form, shape[::-1] if linear.method.is_turned else shape
    return (shape, (num_out, width // form.group, form.group)) if isinstance(form, FourBit) else (shape,)


def _normal(shape: Shape) -> Shape:
    return tuple(sorted(size for size in shape if size != 1))
