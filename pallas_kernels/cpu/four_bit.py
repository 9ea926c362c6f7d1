"""Products with packed kernels in 4 bits, in C.

A weight is stored as q, 0 to 15. With a scale alone it is (q - 8) * scale; with an offset, q * scale - offset. Scales
and offsets are of an output and a group of inputs: float32, float16 or bfloat16, or uint8 in units of their own. What a
checkpoint has is kept as it is, and becomes float32 inside the product.

Shape legend: `T` tokens, `G` groups of inputs of an output, `U` units, of one or several groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cpu import library
from pallas_kernels.cpu.library import MULTIPLY_FOUR_BIT
from pallas_kernels.cpu.products import PANEL

QUAD = 4  # inputs whose weights are next to each other (four_bit.c)
MIDDLE = 8  # is stored for a weight of 0
BLOCK = 32  # inputs that are summed before they are scaled
FLOATS = (jnp.float32, jnp.float16, jnp.bfloat16)
TESTED = ((1, 64, 32), (13, 288, 96))  # rows, inputs and outputs of the self-test's products
TOLERANCE = 1e-5  # of the self-test, of the sum of the products' magnitudes
# What the self-test's weights have, as arguments of `multiply`.
FORMS: dict[str, dict[str, Any]] = {
    "scales": {"scale": jnp.float16},
    "zero points": {"scale": jnp.bfloat16, "offset": jnp.uint8},
    "offsets": {"scale": jnp.float32, "offset": jnp.float16},
    "units": {"scale": jnp.uint8, "scale_unit": jnp.float16, "offset": jnp.uint8, "offset_unit": jnp.float32},
}


def can_pack(shape: tuple[int, ...], group: int) -> bool:
    """Whether a kernel [out, in] with groups of so many inputs has a packed form."""
    return len(shape) == 2 and shape[0] % PANEL == 0 and shape[1] % group == 0 and group % BLOCK == 0


@jax.jit
def pack(kernel: jax.Array) -> jax.Array:
    """A kernel [out, in] of int4, or of int8 from -8 to 7, as panels u8[out / PANEL, in / QUAD, 64]."""
    stored = (kernel.astype(jnp.int8) + MIDDLE).astype(jnp.uint8)
    low, high = jnp.moveaxis(stored.reshape(-1, 2, PANEL // 2, kernel.shape[1] // QUAD, QUAD), 1, 0)
    return (low | high << 4).swapaxes(1, 2).reshape(low.shape[0], -1, PANEL // 2 * QUAD)


@jax.jit
def pack_groups(numbers: jax.Array) -> jax.Array:
    """Scales, offsets or units [out, n] as [out / PANEL, n, PANEL]."""
    return numbers.reshape(-1, PANEL, numbers.shape[1]).swapaxes(1, 2)


def multiply(
    inputs: jax.Array,
    panels: jax.Array,
    scale: jax.Array,
    offset: jax.Array | None = None,
    scale_unit: jax.Array | None = None,
    offset_unit: jax.Array | None = None,
    *,
    round_inputs: bool,
    out_dtype: Any = jnp.float32,
) -> jax.Array:
    """inputs [T, in] times the transpose of the packed kernel: [T, out], added up in float32. The bits of a row do not
    depend on T.

    Args:
        inputs: float32 or bfloat16.
        scale: [out / PANEL, G, PANEL]; of uint8, it is in units of `scale_unit`.
        offset: likewise; of uint8 without a unit, it is in units of the scale: a zero point, 0 to 15.
        scale_unit, offset_unit: [out / PANEL, U, PANEL]. U divides G.
        round_inputs: to int8, each block of 32 inputs with a scale of its own. Sums of a block are then exact.
            Otherwise the weights are widened to float32.
        out_dtype: float32 or bfloat16.

    Raises:
        ValueError: shapes or dtypes do not belong together.
    """
    depth = inputs.shape[1]
    if panels.ndim != 3 or panels.shape[1:] != (depth // QUAD, PANEL // 2 * QUAD):
        raise ValueError(f"panels of shape {panels.shape} are not of {depth} inputs")
    _check("scale", scale, scale_unit, panels, depth)
    if offset is not None:
        _check("offset", offset, scale if offset_unit is None else offset_unit, panels, depth)
    library.load(None)  # an engine has loaded it already, from its folder
    rows, like, of_blocks = inputs.shape[0], jax.ShapeDtypeStruct, (inputs.shape[0], depth // BLOCK)
    # what the C code works in: sums of blocks, and the rounded inputs with their scales and sums
    used = [like(of_blocks, jnp.float32)]
    if round_inputs:
        used += [like(inputs.shape, jnp.int8), like(of_blocks, jnp.float32), like(of_blocks, jnp.int32)]
    call = jax.ffi.ffi_call(MULTIPLY_FOUR_BIT, (like((rows, panels.shape[0] * PANEL), out_dtype), *used))
    given = [jnp.zeros(0, jnp.float32) if x is None else x for x in (scale, scale_unit, offset, offset_unit)]
    return call(inputs if round_inputs else inputs.astype(jnp.float32), panels, *given)[0]


def fault(shapes: Sequence[tuple[int, int, int]] = TESTED) -> str | None:
    """The first wrong product of this machine's C code, in words; None: all agree with float64.

    Whole numbers are multiplied. The largest of each block is 127, so that rounding changes none.

    Args:
        shapes: rows, inputs and outputs of each product.
    """
    rng = np.random.default_rng(0)
    for (rows, num_in, num_out), form in itertools.product(shapes, FORMS):
        stored, inputs = rng.integers(0, 16, (num_out, num_in)), rng.integers(-127, 128, (rows, num_in))
        inputs[:, ::BLOCK] = 127
        weights, numbers = random_groups(form, stored, rng)
        expected, bound = inputs @ weights.T, TOLERANCE * (np.abs(inputs) @ np.abs(weights.T))
        panels = pack(jnp.asarray(stored - MIDDLE, jnp.int8))
        for round_inputs in (False, True):
            found = multiply(jnp.asarray(inputs, jnp.float32), panels, **numbers, round_inputs=round_inputs)
            if not (np.abs(np.asarray(found, np.float64) - expected) <= bound).all():
                rounded = "rounded " if round_inputs else ""
                return (
                    f"the product of {rows} {rounded}rows with {num_out} x {num_in} 4-bit weights with {form} is wrong"
                )
    return None


def random_groups(
    form: str, stored: np.ndarray, rng: np.random.Generator, group: int = BLOCK
) -> tuple[np.ndarray, dict[str, jax.Array]]:
    """For stored numbers [out, in] of 0 to 15, with random groups of one of FORMS: the weights in float64, and what
    `multiply` is given for the groups."""
    num_out, num_in = stored.shape
    numbers = {}
    for name, dtype in FORMS[form].items():
        of_groups = rng.integers(1, 64, (num_out, num_in // group))
        numbers[name] = (rng.uniform(0.01, 1, (num_out, 1)) if "unit" in name else of_groups).astype(dtype)

    def of_weights(name: str) -> np.ndarray:
        return np.repeat(numbers[name].astype(np.float64), num_in // numbers[name].shape[1], axis=1)

    scale = of_weights("scale") * (of_weights("scale_unit") if "scale_unit" in numbers else 1)
    offset = of_weights("offset") if "offset" in numbers else MIDDLE * scale
    if "offset_unit" in numbers:
        offset = offset * of_weights("offset_unit")
    elif FORMS[form].get("offset") == jnp.uint8:
        offset = offset * scale
    return stored * scale - offset, {name: pack_groups(jnp.asarray(x)) for name, x in numbers.items()}


def _check(name: str, numbers: jax.Array, unit: jax.Array | None, panels: jax.Array, depth: int) -> None:
    if numbers.dtype == jnp.uint8 and unit is None:
        raise ValueError(f"a {name} of uint8 needs a unit")
    if numbers.dtype not in (*FLOATS, jnp.uint8):
        raise ValueError(f"a {name} is of float32, float16, bfloat16 or uint8, not of {numbers.dtype}")
    for x in (numbers,) if unit is None else (numbers, unit):
        if x.ndim != 3 or (x.shape[0], x.shape[2]) != (panels.shape[0], PANEL) or depth % (x.shape[1] * BLOCK):
            raise ValueError(f"a {name} or its unit of shape {x.shape} is not of {panels.shape[0]} panels")
