"""Products with packed kernels in C."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cpu import library
from pallas_kernels.cpu.library import MULTIPLY

PANEL = 32  # outputs of a panel (products.c)
TESTED = ((1, 34, 32), (13, 34, 96))  # rows, inputs and outputs of the self-test's products
# Dtype of a kernel -> neighbouring inputs whose weights are stored together.
TOGETHER = {jnp.dtype(jnp.float32): 1, jnp.dtype(jnp.bfloat16): 2, jnp.dtype(jnp.int8): 1}


def can_pack(kernel: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Whether a kernel [out, in] has a packed form."""
    if len(kernel.shape) != 2 or kernel.dtype not in TOGETHER:
        return False
    return kernel.shape[0] % PANEL == 0 and kernel.shape[1] % TOGETHER[kernel.dtype] == 0


@jax.jit
def pack(kernel: jax.Array) -> jax.Array:
    """A kernel [out, in] as panels [out / PANEL, in, PANEL]; in bfloat16, [out / PANEL, in / 2, PANEL * 2] with the two
    weights of an output next to each other."""
    together = TOGETHER[kernel.dtype]
    panels = kernel.reshape(-1, PANEL, kernel.shape[1] // together, together).swapaxes(1, 2)
    return panels.reshape(*panels.shape[:2], PANEL * together)


def multiply(inputs: jax.Array, panels: jax.Array, out_dtype: Any = jnp.float32) -> jax.Array:
    """inputs [T, in] times the transpose of the packed kernel: [T, out], added up in float32. The bits of a row do not
    depend on T.

    Args:
        inputs: of bfloat16 if the kernel is; they are rounded to it.
        out_dtype: float32 or bfloat16.
    """
    library.load(None)  # an engine has loaded it already, from its folder
    of_inputs = jnp.bfloat16 if panels.dtype == jnp.bfloat16 else jnp.float32
    result = jax.ShapeDtypeStruct((inputs.shape[0], panels.shape[0] * PANEL), out_dtype)
    return jax.ffi.ffi_call(MULTIPLY, result)(inputs.astype(of_inputs), panels)


def rows_of(panels: jax.Array, rows: jax.Array) -> jax.Array:
    """Rows [T, in] of a packed kernel. Numbers past its end give any row."""
    together = TOGETHER[panels.dtype]
    rows = jnp.clip(rows, 0, panels.shape[0] * PANEL - 1)
    weights = panels.reshape(*panels.shape[:2], PANEL, together)[rows // PANEL, :, rows % PANEL]
    return weights.reshape(rows.shape[0], -1)


def fault(shapes: Sequence[tuple[int, int, int]] = TESTED) -> str | None:
    """The first wrong product of this machine's C code, in words; None: all are right.

    Whole numbers are multiplied with kernels of every dtype. The sums are exact in float32.

    Args:
        shapes: rows, inputs and outputs of each product.
    """
    rng = np.random.default_rng(0)
    for of_kernel in TOGETHER:
        of_inputs = of_kernel if of_kernel == jnp.bfloat16 else jnp.dtype(jnp.float32)
        for rows, num_in, num_out in shapes:
            kernel = rng.integers(-8, 9, (num_out, num_in)).astype(of_kernel)
            inputs = rng.integers(-8, 9, (rows, num_in)).astype(of_inputs)
            panels, expected = pack(jnp.asarray(kernel)), inputs.astype(np.float64) @ kernel.T.astype(np.float64)
            for out_dtype in (jnp.float32, jnp.bfloat16):
                if not np.array_equal(multiply(jnp.asarray(inputs), panels, out_dtype), expected.astype(out_dtype)):
                    return f"the product of {rows} rows with a kernel {num_out} x {num_in} of {of_kernel} is wrong"
    return None
