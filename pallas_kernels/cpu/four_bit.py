"""Products with packed kernels in 4 bits, in C.

A weight is stored as q, 0 to 15. With a scale alone it is (q - 8) * scale; with an offset, q * scale - offset. Scales
and offsets are of an output and a group of inputs: float32, float16 or bfloat16, or uint8 in units of their own. What a
checkpoint has is kept as it is, and becomes float32 inside the product.

Shape legend: `T` tokens, `G` groups of inputs of an output, `U` units, of one or several groups.
"""

from __future__ import annotations

import itertools
import math
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
BLOCK = 32  # inputs: groups are whole blocks
PART = 256  # inputs that are rounded with one scale
FLOATS = (jnp.float32, jnp.float16, jnp.bfloat16)
TESTED = ((1, 128, 32), (13, 288, 96))  # rows, inputs and outputs of the self-test's products
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
        round_inputs: to int8, each 256 neighbouring inputs, and what is left, with a scale of their own. Sums of those
            of a group are then exact. Otherwise the weights are widened to float32.
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
    rows, like, parts = inputs.shape[0], jax.ShapeDtypeStruct, -(-depth // PART)
    # what the C code works in: sums of steps, and the rounded inputs with their scales and what sums begin with
    of_steps = (parts, rows, PART // BLOCK)
    used = [like(of_steps, jnp.float32)]
    if round_inputs:
        used += [like((parts, rows, PART), jnp.int8), like((parts, rows), jnp.float32), like(of_steps, jnp.int32)]
    call = jax.ffi.ffi_call(MULTIPLY_FOUR_BIT, (like((rows, panels.shape[0] * PANEL), out_dtype), *used))
    given = [jnp.zeros(0, jnp.float32) if x is None else x for x in (scale, scale_unit, offset, offset_unit)]
    return call(inputs if round_inputs else inputs.astype(jnp.float32), panels, *given)[0]


def fault(shapes: Sequence[tuple[int, int, int]] = TESTED) -> str | None:
    """The first wrong product of this machine's C code, in words; None: all agree with float64.

    Whole numbers are multiplied. The largest of each part is 127, so that rounding changes none. Groups are the largest
    for one row, and the smallest for several.

    Args:
        shapes: rows, inputs and outputs of each product.
    """
    rng = np.random.default_rng(0)
    cases, names, expected = [], [], []
    for (rows, num_in, num_out), form in itertools.product(shapes, FORMS):
        values, inputs = rng.integers(-MIDDLE, MIDDLE, (num_out, num_in)), rng.integers(-127, 128, (rows, num_in))
        inputs[:, ::PART] = 127
        group = math.gcd(num_in, PART) if rows == 1 else BLOCK
        numbers, weights = random_groups(form, values, group, rng)
        cases.append((inputs.astype(np.float32), values.astype(np.int8), numbers))
        expected.append((inputs @ weights.T, TOLERANCE * (np.abs(inputs) @ np.abs(weights.T))))
        names.append(f"{rows} rows with {num_out} x {num_in} 4-bit weights with {form}")
    for name, (wanted, bound), found in zip(names, expected, _tested(cases), strict=True):
        for kind, product in found.items():
            if not (np.abs(np.asarray(product, np.float64) - wanted) <= bound).all():
                return f"the product of {name}, {kind}, is wrong"
    return None


def random_groups(
    form: str, values: np.ndarray, group: int, rng: np.random.Generator
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """What weights of one of FORMS have for their groups, as arguments of `multiply` before they are packed, and the
    weights in float64.

    Args:
        values: [out, in], -8 to 7.
        group: inputs.
    """
    num_out, num_in = values.shape
    of_groups, of_outputs = (num_out, num_in // group), (num_out, 1)
    numbers = {
        name: (rng.uniform(0.01, 1, of_outputs) if "unit" in name else rng.integers(1, 64, of_groups)).astype(dtype)
        for name, dtype in FORMS[form].items()
    }
    wide = {name: np.repeat(x, num_in // x.shape[1], axis=1).astype(np.float64) for name, x in numbers.items()}
    scale = wide["scale"] * wide.get("scale_unit", 1)
    if "offset" not in wide:
        return numbers, values * scale
    unit = wide.get("offset_unit", scale if FORMS[form]["offset"] == jnp.uint8 else 1)
    return numbers, (values + MIDDLE) * scale - wide["offset"] * unit


@jax.jit
def _tested(cases: list[tuple[jax.Array, jax.Array, dict[str, jax.Array]]]) -> list[dict[str, jax.Array]]:
    """What `fault` compares, compiled as one program."""
    found = []
    for inputs, values, numbers in cases:
        panels, packed = pack(values), {name: pack_groups(x) for name, x in numbers.items()}
        kinds = {"with rounded inputs": True, "with inputs as they are": False}
        found.append({kind: multiply(inputs, panels, **packed, round_inputs=kinds[kind]) for kind in kinds})
    return found


def _check(name: str, numbers: jax.Array, unit: jax.Array | None, panels: jax.Array, depth: int) -> None:
    if numbers.dtype not in (*FLOATS, jnp.uint8):
        raise ValueError(f"{name}: it is of float32, float16, bfloat16 or uint8, not of {numbers.dtype}")
    if numbers.dtype == jnp.uint8 and unit is None:
        raise ValueError(f"{name}: numbers of uint8 need a unit")
    for x in (numbers,) if unit is None else (numbers, unit):
        if x.ndim != 3 or (x.shape[0], x.shape[2]) != (panels.shape[0], PANEL) or depth % (x.shape[1] * BLOCK):
            raise ValueError(
                f"{name}: the shape {x.shape} is not that of {panels.shape[0]} panels and groups of whole {BLOCK}s of "
                f"{depth} inputs"
            )
