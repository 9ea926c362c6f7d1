"""What a compiled TPU step does between its products and its attention kernels, by XLA's own estimate of cycles.

Every operation of a compiled program carries `estimated_cycles`, except kernels. Those of one layer are the operations
that are scheduled between the attention of one layer and the attention of the next. Operations that run next to others
(copies of weights that are started early) have no estimate.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_CALLED = re.compile(r"(?:calls|to_apply)=%([\w.\-]+)")
# Names of kernels. Of the first that a program has, each layer has one.
ATTENTION = ("paged_attention_mixed", "paged_attention", "ragged_paged_attention")


@dataclass(kw_only=True)
class LayerCycles:
    """Estimated cycles of one layer: the average from a program's first attention to its last."""

    products: float = 0.0
    glue: float = 0.0  # everything else, kernels excepted


def layer_cycles(program: str) -> LayerCycles:
    """The cycles of a layer in a compiled program's text. Raises ValueError if it has fewer than two attention
    calls."""
    computations: dict[str, list[str]] = {}
    entry = body = ""
    for line in program.splitlines():
        if begins := _COMPUTATION.match(line):
            body = begins[2]
            entry = body if begins[1] else entry
            computations[body] = []
        elif body:
            computations[body].append(line)
    lines = computations[entry]
    names = [line.split(" = ")[0] if "custom-call(" in line else "" for line in lines]
    calls = next(filter(None, ([i for i, name in enumerate(names) if f"%{of}" in name] for of in ATTENTION)), [])
    if len(calls) < 2:
        raise ValueError(f"a program of at least two layers is needed: {len(calls)} calls of {' or '.join(ATTENTION)}")
    found = LayerCycles()
    for i in range(calls[0] + 1, calls[-1]):
        cycles = _CYCLES.search(lines[i])
        if cycles is None:
            continue
        if _is_product(lines[i], computations):
            found.products += int(cycles[1])
        else:
            found.glue += int(cycles[1])
    num_layers = len(calls) - 1
    found.products /= num_layers
    found.glue /= num_layers
    return found


def _is_product(line: str, computations: dict[str, list[str]]) -> bool:
    """Whether an operation multiplies matrices, itself or in what it calls."""
    if " convolution(" in line or " dot(" in line:
        return True
    called = _CALLED.search(line)
    return called is not None and any(_is_product(inner, computations) for inner in computations.get(called[1], ()))
