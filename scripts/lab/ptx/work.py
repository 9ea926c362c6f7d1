"""Asynchronous work of a block."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from scripts.lab.ptx.isa import Instruction


@dataclass(eq=False)
class Work:
    """Asynchronous work that is under way."""

    ins: Instruction
    description: str
    land: Callable[[], None]
    order: Hashable = None  # works with the same one land in their order
    component: int | None = None  # of the clocks: somebody must have waited for `time` when the block ends
    time: int = 0
