"""Arrays of zeros that take no memory until they are used, so a large array is made at once."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from pallas_kernels.cpu import library
from pallas_kernels.cpu.library import ZEROS


def zeros(likes: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
    """Zeros of these shapes, of int8, bfloat16, float32 or int32."""
    return list(library.function(ZEROS, [jax.ShapeDtypeStruct(like.shape, like.dtype) for like in likes])())
