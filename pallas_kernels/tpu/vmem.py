"""The VMEM that a kernel requests from the compiler."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

COMPILER_BYTES = 16 << 20  # for the compiler, besides the scratch buffers: spilled registers, operands of fusions


def bytes_with(scratch: list[Any]) -> int:
    """The limit for a kernel with these scratch buffers, which are all in VMEM."""
    return sum(math.prod(ref.shape) * jnp.dtype(ref.dtype).itemsize for ref in scratch) + COMPILER_BYTES
