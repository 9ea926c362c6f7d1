"""Which commands of a GPU's step refer to memory whose address changes from step to step, from XLA's dumps.

XLA updates each node of a CUDA graph that refers to a buffer with a new address. Weights, K/V pages and the rest of the
state keep their addresses, and so do temporaries with the allocator of `model.compiling.compiler_options`. The host's
packed buffer and the step's output move.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

_NO_COMMANDS = {"bitcast", "call", "conditional", "get-tuple-element", "parameter", "tuple", "while"}


def read_moving(assignment: str, values: str, program: str, sizes: Collection[int]) -> dict[str, Any]:
    """The number of commands that refer to a moving buffer, and the names of the kernels of ours among them.

    Args:
        assignment: the dump of the buffer assignment.
        values: the dump of its values, with their uses.
        program: the optimised program.
        sizes: the lengths of the i32 arguments that move.
    """
    moving = _moving_values(assignment, sizes)
    opcodes = dict(re.findall(r"%([\w.\-]+) = (?:\(.*?\)|\S+) ([a-z][\w\-]*)\(", program))
    commands: set[str] = set()
    for block in re.split(r"^(?=<\d+ )", values, flags=re.MULTILINE):
        head = re.match(r"<(\d+) ([\w.\-]+)", block)
        if head is not None and head[1] in moving:
            uses = re.findall(r"^  ([\w.\-]+)(?: \{[\d,]*\})?, operand \d+", block, re.MULTILINE)
            commands |= {name for name in (head[2], *uses) if opcodes.get(name, "tuple") not in _NO_COMMANDS}
    return {
        "moving_commands": len(commands),
        "moving_kernels": sorted(name for name in commands if opcodes[name] == "custom-call"),
    }


def _moving_values(assignment: str, sizes: Collection[int]) -> set[str]:
    """The numbers of the values in buffers that move: arguments of these sizes, and results that reuse no argument."""
    arguments = {f"s32[{size}]" for size in sizes}
    moves, found = False, set()
    for line in assignment.splitlines():
        if line.startswith("allocation"):
            argument = re.search(r"parameter \d+, shape \|(.*?)\|", line)
            is_result = "maybe-live-out" in line and "output shape is |(" not in line
            moves = is_result if argument is None else argument[1] in arguments
        elif moves and (value := re.match(r" value: <(\d+) ", line)):
            found.add(value[1])
    return found
