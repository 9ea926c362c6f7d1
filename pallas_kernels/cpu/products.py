"""Products with packed kernels in C."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cpu import library
from pallas_kernels.cpu.library import MULTIPLY, MULTIPLY_ROUNDED

PANEL = 32  # outputs of a panel (products.c)
TESTED = ((1, 34, 32), (13, 34, 96))  # rows, inputs and outputs of the self-test's products
OUT_DTYPES = (jnp.float32, jnp.bfloat16)
# Dtype of a kernel -> the number of neighbouring inputs whose weights are stored together.
TOGETHER = {jnp.dtype(jnp.float32): 1, jnp.dtype(jnp.bfloat16): 2, jnp.dtype(jnp.int8): 1}
CACHE_WAY = 4096  # bytes; addresses at multiples of this distance share a few lines of a core's first cache
GAP = 64  # bytes between the rows of a copy (products.c)
TOGETHER_ROUNDED = 4  # neighbouring inputs stored together in an int8 kernel for inputs that are rounded to int8


def can_pack(kernel: jax.Array | jax.ShapeDtypeStruct, together: int | None = None) -> bool:
    """Whether a kernel [out, in] has a packed form. `together` is the argument of `pack`."""
    if len(kernel.shape) != 2 or kernel.dtype not in TOGETHER:
        return False
    return kernel.shape[0] % PANEL == 0 and kernel.shape[1] % (together or TOGETHER[kernel.dtype]) == 0


@partial(jax.jit, static_argnums=1)
def pack(kernel: jax.Array, together: int | None = None) -> jax.Array:
    """Packs a kernel [out, in] to panels [out / PANEL, in / together, PANEL * together]. `together` weights of an
    output are next to each other.

    Args:
        together: None: one, or two in bfloat16. `multiply_rounded` needs TOGETHER_ROUNDED.
    """
    together = together or TOGETHER[kernel.dtype]
    panels = kernel.reshape(-1, PANEL, kernel.shape[1] // together, together).swapaxes(1, 2)
    return panels.reshape(*panels.shape[:2], PANEL * together)


def multiply(
    inputs: jax.Array, panels: jax.Array, out_dtype: Any = jnp.float32, scale: jax.Array | None = None
) -> jax.Array:
    """inputs [T, in] times the transpose of the packed kernel: [T, out]. Sums are in float32. The bits of a row do not
    depend on T.

    Args:
        inputs: rounded to bfloat16 if the kernel is in bfloat16, otherwise converted to float32.
        out_dtype: float32 or bfloat16.
        scale: f32[out]; the outputs are multiplied by it before they are rounded.
    """
    of_inputs = jnp.bfloat16 if panels.dtype == jnp.bfloat16 else jnp.float32
    inputs = inputs.astype(of_inputs)
    out = jax.ShapeDtypeStruct((inputs.shape[0], panels.shape[0] * PANEL), out_dtype)
    scales = () if scale is None else (scale,)
    return library.function(MULTIPLY, (out, _gapped(inputs.shape, inputs.dtype)))(inputs, panels, *scales)[0]


def multiply_rounded(
    inputs: jax.Array,
    panels: jax.Array,
    scale: jax.Array,
    input_scale: jax.Array | None = None,
    out_dtype: Any = jnp.float32,
) -> jax.Array:
    """inputs [T, in], rounded to int8, times the transpose of a kernel in int8: [T, out]. The sums are exact. They are
    multiplied by the scale of the output, and then by the scale of the inputs. The bits of a row do not depend on T.

    Args:
        inputs: float32 or bfloat16.
        panels: i8[out / PANEL, in / TOGETHER_ROUNDED, PANEL * TOGETHER_ROUNDED]; up to 2^17 inputs.
        scale: the scales f32[out] of the kernel.
        input_scale: the scale f32[] of all inputs; larger inputs are clipped. None: each row has its own scale.
        out_dtype: float32 or bfloat16.
    """
    rows, like = inputs.shape[0], jax.ShapeDtypeStruct
    results = (
        like((rows, panels.shape[0] * PANEL), out_dtype),
        # The C code's work space: the rounded inputs, their scales and their sums.
        like(inputs.shape, jnp.int8),
        like((rows,), jnp.float32),
        like((rows,), jnp.int32),
        _gapped(inputs.shape, jnp.dtype(jnp.int8)),
    )
    stored = jnp.zeros(0, jnp.float32) if input_scale is None else input_scale.reshape(1)
    return library.function(MULTIPLY_ROUNDED, results)(inputs, panels, scale, stored)[0]


def _gapped(shape: Sequence[int], dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
    """Room for a copy of the inputs with gaps between the rows, if rows would otherwise evict each other from the
    cache. It is empty if no copy is needed. A CPU may widen bfloat16 to float32, so there is always room for that."""
    rows, size = shape[0], shape[1] * dtype.itemsize
    widens = dtype == jnp.bfloat16
    needed = rows > 1 and (widens or size % CACHE_WAY == 0)
    size *= 1 + widens
    return jax.ShapeDtypeStruct((rows, (size + GAP) // dtype.itemsize) if needed else (0,), dtype)


def rows_of(panels: jax.Array, rows: jax.Array) -> jax.Array:
    """The rows [T, in] of a packed kernel. A number out of range gives the first or the last row."""
    together = panels.shape[2] // PANEL
    rows = jnp.clip(rows, 0, panels.shape[0] * PANEL - 1)
    weights = panels.reshape(*panels.shape[:2], PANEL, together)[rows // PANEL, :, rows % PANEL]
    return weights.reshape(rows.shape[0], -1)


def fault(shapes: Sequence[tuple[int, int, int]] = TESTED) -> str | None:
    """The first wrong product of this machine's C code, in words; None: all are right.

    Whole numbers are multiplied with kernels of every dtype. The sums are exact in float32. For int8, the largest
    number of a row is 127, so its scale is one.

    Args:
        shapes: rows, inputs and outputs of each product.
    """
    rng = np.random.default_rng(0)
    plain, rounded, expected, names = [], [], [], []
    for of_kernel, (rows, num_in, num_out) in itertools.product(TOGETHER, shapes):
        of_inputs = of_kernel if of_kernel == jnp.bfloat16 else jnp.dtype(jnp.float32)
        kernel = rng.integers(-8, 9, (num_out, num_in)).astype(of_kernel)
        inputs = rng.integers(-8, 9, (rows, num_in)).astype(of_inputs)
        plain.append((inputs, kernel))
        product = inputs.astype(np.float64) @ kernel.T.astype(np.float64)
        expected.append([product.astype(out_dtype) for out_dtype in OUT_DTYPES])
        names.append(f"{rows} rows with a kernel {num_out} x {num_in} of {of_kernel}")
    for rows, num_in, num_out in shapes:
        kernel = rng.integers(-127, 128, (num_out, num_in - num_in % TOGETHER_ROUNDED)).astype(np.int8)
        if kernel.size == 0:
            continue
        inputs = rng.integers(-127, 128, (rows, kernel.shape[1])).astype(np.float32)
        inputs[:, 0] = 127
        rounded.append((inputs, kernel))
        sums = (inputs.astype(np.int64) @ kernel.T.astype(np.int64)).astype(np.float32)
        expected.append([sums * (np.float32(127) * np.float32(1 / 127)), sums])
        names.append(f"{rows} rows of int8 with a kernel {num_out} x {num_in} of int8")
    for name, wanted, found in zip(names, expected, _tested(plain, rounded), strict=True):
        if not all(map(np.array_equal, found, wanted)):
            return f"the product of {name} is wrong"
    return None


def _tested(plain: Any, rounded: Any) -> list[list[jax.Array]]:
    """The products that `fault` compares. They are one program, because each program is looked up on the disk.

    Args:
        plain, rounded: the inputs and the kernel of each product.
    """

    def compute(plain: Any, rounded: Any) -> list[list[jax.Array]]:
        found = []
        for inputs, kernel in plain:
            panels = pack(kernel)
            found.append([multiply(inputs, panels, out_dtype) for out_dtype in OUT_DTYPES])
        for inputs, kernel in rounded:
            panels, ones = pack(kernel, TOGETHER_ROUNDED), jnp.ones(kernel.shape[0], jnp.float32)
            found.append([multiply_rounded(inputs, panels, ones, of_inputs) for of_inputs in (None, jnp.float32(1))])
        return found

    return jax.jit(compute)(plain, rounded)
