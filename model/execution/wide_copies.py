"""Finds quantised weights that a compiled program writes out in a wider type.

XLA converts an 8-bit kernel inside a product, where the chip and the compiler can. Otherwise it writes the whole kernel
in a wider type at every step, which takes more time than weights that are not quantised. No second program is compiled
for comparison: a copy takes at least the bytes of the smallest kernel in 16 bits, so a program with smaller temporaries
has none, and the text of the others is searched. Temporaries are also compared with `memory_plan.temporaries_bound`,
which holds for weights that are not quantised: this also finds copies in other shapes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from flax import nnx
from jax.sharding import Mesh

from batcher.step import Bucket
from model.config import LlamaConfig
from model.execution.memory_plan import step_temporaries
from model.network import cpu_products
from model.network.llama import Llama
from pallas_kernels.api import PagedAttention

MIB = 1 << 20
WIDE_BYTES = {"bf16": 2, "f16": 2, "f32": 4}
# Their results are no new memory.
_ALIASES = {"parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call", "opt-barrier"}
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (.*?) ([\w\-]+)\(")
_ARRAY = re.compile(r"(\w+)\[([\d,]+)\]")
_FUSED = re.compile(r" fusion\(.*?calls=%?([\w.\-]+)")

Shape = tuple[int, ...]


def narrow_kernels(model: Llama, platform: str, mesh: Mesh | None) -> dict[Shape, str]:
    """The 8-bit kernels of which no program may write a wide copy: their shapes on one device, as sorted sizes without
    ones, and a parameter of each. On a CPU, small kernels are converted whole, and so are all in a mesh."""
    if platform == "cpu" and mesh is not None:
        return {}
    min_weights = cpu_products.BLOCK_WEIGHTS if platform == "cpu" else 0
    kernels: dict[Shape, str] = {}
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        value = variable.get_value()
        if value.ndim == 2 and value.dtype.itemsize == 1:
            shape = value.sharding.shard_shape(value.shape)
            if math.prod(shape) > min_weights:
                kernels.setdefault(_normal(shape), ".".join(map(str, path)))
    return kernels


def find(text: str, kernels: Mapping[Shape, str]) -> dict[str, int]:
    """The arrays in an optimised program that have a kernel's shape and a wide type, as `name: type[shape]`, with their
    bytes. What stays inside a fusion is not written to memory and does not count."""
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
            name = kernels.get(_normal(shape))
            if dtype in WIDE_BYTES and name is not None:
                found[f"{name}: {dtype}[{sizes}]"] = math.prod(shape) * WIDE_BYTES[dtype]
    return found


def check(
    programs: Mapping[Bucket, Any], kernels: Mapping[Shape, str], config: LlamaConfig, attention: PagedAttention
) -> None:
    """Checks compiled programs.

    Args:
        kernels: of `narrow_kernels`; if there are none, nothing is checked.
        config: with `attention`, says what a program may need if its weights are not quantised.

    Raises:
        ValueError: a program writes a kernel in a wide type. The message names the program, the kernels and the sizes.
    """
    if not kernels:
        return
    smallest = 2 * min(math.prod(shape) for shape in kernels)
    for bucket, program in programs.items():
        size = program.memory_analysis().temp_size_in_bytes
        if size < smallest:
            continue
        # A product's output can have the shape of a kernel if its tokens are as many as a kernel's rows or columns.
        clear = {
            shape: name
            for shape, name in kernels.items()
            if bucket.num_tokens not in shape and bucket.num_rows not in shape
        }
        copies = find(program.as_text(), clear)
        program_name = f"the program for {bucket.num_tokens} tokens in {bucket.num_rows} rows ({bucket.variant})"
        if copies:
            listed = ", ".join(f"{name} ({size / MIB:.0f} MiB)" for name, size in copies.items())
            raise ValueError(
                f"{program_name} writes 8-bit weights out in a wider type at every step, which is slower than weights "
                f"that are not quantised: {listed}. Choose another --quantization, or none"
            )
        bound = step_temporaries(config, attention, num_tokens=bucket.num_tokens, num_rows=bucket.num_rows)
        if size > bound + smallest:
            raise ValueError(
                f"{program_name} has {size / MIB:.0f} MiB of temporaries, and without quantised weights at most "
                f"{bound / MIB:.0f} MiB: it probably writes weights out in a wider type. Choose another "
                f"--quantization, or none"
            )


def _normal(shape: Shape) -> Shape:
    return tuple(sorted(size for size in shape if size != 1))
