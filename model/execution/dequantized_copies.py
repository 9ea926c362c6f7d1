"""Finds quantised weights that a compiled program writes out in a wider type.

XLA converts a kernel of 8 or 4 bits inside a product if the chip and the compiler can do this. Otherwise it writes the
whole kernel in a wider type at every step, which takes more time than weights that are not quantised.

A copy takes at least the bytes of the smallest kernel in twice its bits, so programs with smaller temporaries have no
copy. The text of the other programs is searched. Temporaries are also compared with `memory_plan.temporaries_bound`,
which holds for weights that are not quantised. This finds copies in other shapes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from flax import nnx
from jax.sharding import Mesh

from batcher.step import Bucket
from model.config import LlamaConfig
from model.execution.memory_plan import step_temporaries
from model.network import cpu_products
from model.network.linear import Linear
from model.network.llama import Llama
from pallas_kernels.api import PagedAttention
from pallas_kernels.spec import Backend

MIB = 1 << 20
# With more tokens, the product takes longer than the copy (on an H100 from some 740 tokens on), and a product that
# reads a copy can be the fastest one.
MAX_TOKENS = 1024
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
        for written in module.method.shapes(shape):
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


def check(
    programs: Mapping[Bucket, Any],
    kernels: Mapping[Shape, Quantized],
    config: LlamaConfig,
    attention: PagedAttention,
) -> list[str]:
    """Checks compiled programs. Returns a remark for every copy that the compiler may have chosen for its speed.

    Args:
        kernels: the result of `quantized_kernels`. If it is empty, nothing is checked.
        config, attention: decide the memory that a program may need if its weights are not quantised.

    Raises:
        ValueError: a program of few tokens writes a kernel in a wider type. The message names the program, the kernels
            and the sizes.
    """
    remarks = []
    smallest = min((math.prod(shape) * kernel.bits // 4 for shape, kernel in kernels.items()), default=0)
    for bucket, program in programs.items() if kernels else ():
        size = program.memory_analysis().temp_size_in_bytes
        if size < smallest:
            continue
        copies = find(program.as_text(), told_apart(kernels, bucket.num_tokens, bucket.num_rows))
        num_drawn = bucket.num_rows * (1 + bucket.num_drafts)
        bound = step_temporaries(config, attention, num_tokens=bucket.num_tokens, num_rows=num_drawn)
        if copies:
            listed = ", ".join(f"{name} ({size / MIB:.0f} MiB)" for name, size in copies.items())
            fault = f"writes quantised weights out in a wider type at every step: {listed}"
        elif size > bound + smallest and attention.backend is not Backend.REFERENCE:  # which may exceed the bound
            fault = (
                f"has {size / MIB:.0f} MiB of temporaries, and without quantised weights at most "
                f"{bound / MIB:.0f} MiB: it probably writes weights out in a wider type"
            )
        else:
            continue
        remark = f"the program for {bucket.num_tokens} tokens in {bucket.num_rows} rows ({bucket.variant}) {fault}"
        if bucket.num_tokens <= MAX_TOKENS:
            raise ValueError(f"{remark}. This is slower than no quantisation: choose another --quantization, or none")
        remarks.append(remark)
    return remarks


def _normal(shape: Shape) -> Shape:
    return tuple(sorted(size for size in shape if size != 1))
