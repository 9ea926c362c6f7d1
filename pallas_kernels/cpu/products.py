"""Products with packed kernels in C."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.cpu import library
from pallas_kernels.cpu.library import MULTIPLY

PANEL = 32  # outputs of a panel (products.c)
DTYPES = (jnp.dtype(jnp.float32), jnp.dtype(jnp.int8))  # of kernels


def can_pack(kernel: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Whether a kernel [out, in] has a packed form."""
    return len(kernel.shape) == 2 and kernel.shape[0] % PANEL == 0 and kernel.dtype in DTYPES


@jax.jit
def pack(kernel: jax.Array) -> jax.Array:
    """A kernel [out, in] as panels [out / PANEL, in, PANEL]."""
    return kernel.reshape(-1, PANEL, kernel.shape[1]).swapaxes(1, 2)


def multiply(inputs: jax.Array, panels: jax.Array) -> jax.Array:
    """inputs [T, in] times the transpose of the packed kernel: f32[T, out]. The bits of a row do not depend on T."""
    library.load(None)  # an engine has loaded it already, from its folder
    result = jax.ShapeDtypeStruct((inputs.shape[0], panels.shape[0] * PANEL), jnp.float32)
    return jax.ffi.ffi_call(MULTIPLY, result)(inputs.astype(jnp.float32), panels)


def rows_of(panels: jax.Array, rows: jax.Array) -> jax.Array:
    """Rows [T, in] of a packed kernel. Numbers past its end give any row."""
    rows = jnp.clip(rows, 0, panels.shape[0] * PANEL - 1)
    return panels[rows // PANEL, :, rows % PANEL]
