"""Products with packed kernels in 4 or 6 bits, in C.

A weight is stored as q, 0 to 15. With only a scale, the weight is (q - 8) * scale; with an offset, it is q * scale -
offset. In 6 bits, q is 0 to 63, and 32 replaces 8. Each output and group of inputs has a scale, and perhaps an offset:
float32, float16 or bfloat16, or uint8 or int8 with separate units. The numbers of a checkpoint are kept as they are
stored, and become float32 inside the product.

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
MIDDLE, MIDDLE_OF_SIX = 8, 32  # is stored for a weight of 0
BLOCK, BLOCK_OF_SIX = 32, 16  # inputs: groups are whole blocks
PART = 256  # inputs that are rounded with one scale
FLOATS, WHOLE = (jnp.float32, jnp.float16, jnp.bfloat16), (jnp.uint8, jnp.int8)
TESTED = ((1, 128, 32), (13, 288, 96), (2, 512, 32))  # rows, inputs and outputs of the self-test's products
TOLERANCE = 1e-5  # of the self-test, of the sum of the products' magnitudes
SIX_BITS = "six bits"
# What the self-test's weights have, as arguments of `multiply`.
FORMS: dict[str, dict[str, Any]] = {
    "scales": {"scale": jnp.float16},
    "zero points": {"scale": jnp.bfloat16, "offset": jnp.uint8},
    "offsets": {"scale": jnp.float32, "offset": jnp.float16},
    "units": {"scale": jnp.uint8, "scale_unit": jnp.float16, "offset": jnp.uint8, "offset_unit": jnp.float32},
    SIX_BITS: {"scale": jnp.int8, "scale_unit": jnp.float16},
}


def can_pack(shape: tuple[int, ...], group: int) -> bool:
    """Whether a kernel [out, in] with groups of `group` inputs has a packed form."""
    return len(shape) == 2 and shape[0] % PANEL == 0 and shape[1] % group == 0 and group % BLOCK == 0


def can_pack_six(shape: tuple[int, ...]) -> bool:
    """Whether a kernel [out, in] of 6 bits, with units of 256 inputs, has a packed form."""
    return len(shape) == 2 and shape[0] % PANEL == 0 and shape[1] % PART == 0


@jax.jit
def pack(kernel: jax.Array) -> jax.Array:
    """A kernel [out, in] of int4, or of int8 from -8 to 7, as panels u8[out / PANEL, in / QUAD, 64]."""
    return _pack_halves((kernel.astype(jnp.int8) + MIDDLE).astype(jnp.uint8))


@jax.jit
def pack_six(kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A kernel i8[out, in] from -32 to 31 as its lower 4 bits, u8[out / PANEL, in / QUAD, 64], and its upper 2 bits,
    u8[out / PANEL, in / 16, 128]."""
    stored = (kernel + MIDDLE_OF_SIX).astype(jnp.uint8)
    quads = jnp.moveaxis((stored >> 4).reshape(-1, PANEL, kernel.shape[1] // 16, 4, QUAD), 3, 0)
    high = quads[0] | quads[1] << 2 | quads[2] << 4 | quads[3] << 6
    return _pack_halves(stored & 15), high.swapaxes(1, 2).reshape(high.shape[0], -1, PANEL * QUAD)


def _pack_halves(stored: jax.Array) -> jax.Array:
    """u8[out, in] of 4 bits -> u8[out / PANEL, in / QUAD, 64]."""
    low, high = jnp.moveaxis(stored.reshape(-1, 2, PANEL // 2, stored.shape[1] // QUAD, QUAD), 1, 0)
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
    high: jax.Array | None = None,
    round_inputs: bool,
    out_dtype: Any = jnp.float32,
) -> jax.Array:
    """inputs [T, in] times the transpose of the packed kernel: [T, out], added up in float32. The bits of a row do not
    depend on T.

    Args:
        inputs: float32 or bfloat16.
        scale: [out / PANEL, G, PANEL]; of uint8 or int8, it is in units of `scale_unit`. A group is whole blocks of 32
            inputs; in 6 bits, of 16.
        offset: of the same shape. If it is uint8 without a unit, it is in units of the scale: a zero point.
        scale_unit, offset_unit: [out / PANEL, U, PANEL]. U divides G.
        high: the upper bits of 6, u8[out / PANEL, in / 16, 128]; None: weights have 4 bits.
        round_inputs: rounds the inputs to int8. Each block of 256 neighbouring inputs, and the rest, has a scale. The
            sums of a group are then exact. Otherwise the weights are widened to float32.
        out_dtype: float32 or bfloat16.

    Raises:
        ValueError: shapes or dtypes do not belong together.
    """
    depth = inputs.shape[1]
    if panels.ndim != 3 or panels.shape[1:] != (depth // QUAD, PANEL // 2 * QUAD):
        raise ValueError(f"panels of shape {panels.shape} are not of {depth} inputs")
    if high is not None and (depth % 16 or high.shape != (panels.shape[0], depth // 16, PANEL * QUAD)):
        raise ValueError(f"upper bits of shape {high.shape} are not of {panels.shape[0]} panels and {depth} inputs")
    block = BLOCK if high is None else BLOCK_OF_SIX
    _check("scale", scale, scale_unit, panels, depth, block)
    if offset is not None:
        _check("offset", offset, scale if offset_unit is None else offset_unit, panels, depth, block)
    rows, like, parts = inputs.shape[0], jax.ShapeDtypeStruct, -(-depth // PART)
    # what the C code works in: sums of steps, and the rounded inputs with their scales and what sums begin with
    of_steps = (parts, rows, PART // block)
    used = [like(of_steps, jnp.float32)]
    if round_inputs:
        used += [like((parts, rows, PART), jnp.int8), like((parts, rows), jnp.float32), like(of_steps, jnp.int32)]
    call = library.function(MULTIPLY_FOUR_BIT, (like((rows, panels.shape[0] * PANEL), out_dtype), *used))
    given = [jnp.zeros(0, jnp.float32) if x is None else x for x in (scale, scale_unit, offset, offset_unit, high)]
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
        middle, block = (MIDDLE_OF_SIX, BLOCK_OF_SIX) if form == SIX_BITS else (MIDDLE, BLOCK)
        values, inputs = rng.integers(-middle, middle, (num_out, num_in)), rng.integers(-127, 128, (rows, num_in))
        inputs[:, ::PART] = 127
        group = math.gcd(num_in, PART) if rows == 1 else block
        unit_group = num_in if num_in % PART else PART
        numbers, weights = random_groups(form, values, group, rng, unit_group=unit_group)
        cases.append((inputs.astype(np.float32), values.astype(np.int8), numbers))
        expected.append((inputs @ weights.T, TOLERANCE * (np.abs(inputs) @ np.abs(weights.T))))
        names.append(f"{rows} rows with {num_out} x {num_in} weights with {form}")
    for name, (wanted, bound), found in zip(names, expected, _tested(cases), strict=True):
        for kind, product in found.items():
            if not (np.abs(np.asarray(product, np.float64) - wanted) <= bound).all():
                return f"the product of {name}, {kind}, is wrong"
    return None


def random_groups(
    form: str, values: np.ndarray, group: int, rng: np.random.Generator, *, unit_group: int | None = None
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Random scales and offsets for weights of one of FORMS, as arguments of `multiply` before they are packed, and the
    weights in float64.

    Args:
        values: the stored values [out, in], -8 to 7, or -32 to 31.
        group: the number of inputs of a group.
        unit_group: the number of inputs of a unit of scales or offsets. None: all.
    """
    num_out, num_in = values.shape
    of_groups, of_units = (num_out, num_in // group), (num_out, num_in // (unit_group or num_in))
    numbers = {
        name: (
            rng.uniform(0.01, 1, of_units)
            if "unit" in name
            else rng.integers(-63 if dtype == jnp.int8 else 1, 64, of_groups)
        ).astype(dtype)
        for name, dtype in FORMS[form].items()
    }
    wide = {name: np.repeat(x, num_in // x.shape[1], axis=1).astype(np.float64) for name, x in numbers.items()}
    scale = wide["scale"] * wide.get("scale_unit", 1)
    if "offset" not in wide:
        return numbers, values * scale
    unit = wide.get("offset_unit", scale if FORMS[form]["offset"] == jnp.uint8 else 1)
    return numbers, (values + MIDDLE) * scale - wide["offset"] * unit


def pack_all(values: jax.Array, numbers: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Packs weights [out, in] and their numbers from `random_groups` as arguments of `multiply`."""
    packed = {name: pack_groups(x) for name, x in numbers.items()}
    if numbers["scale"].dtype != jnp.int8:
        return packed | {"panels": pack(values)}
    return packed | dict(zip(("panels", "high"), pack_six(values), strict=True))


@jax.jit
def _tested(cases: list[tuple[jax.Array, jax.Array, dict[str, jax.Array]]]) -> list[dict[str, jax.Array]]:
    """What `fault` compares, compiled as one program."""
    found = []
    for inputs, values, numbers in cases:
        packed = pack_all(values, numbers)
        kinds = {"with rounded inputs": True, "with inputs as they are": False}
        found.append({kind: multiply(inputs, **packed, round_inputs=kinds[kind]) for kind in kinds})
    return found


def _check(name: str, numbers: jax.Array, unit: jax.Array | None, panels: jax.Array, depth: int, block: int) -> None:
    if numbers.dtype not in (*FLOATS, *WHOLE):
        raise ValueError(f"{name}: it is of float32, float16, bfloat16, uint8 or int8, not of {numbers.dtype}")
    if numbers.dtype in WHOLE and unit is None:
        raise ValueError(f"{name}: numbers of {numbers.dtype} need a unit")
    for x in (numbers,) if unit is None else (numbers, unit):
        if x.ndim != 3 or (x.shape[0], x.shape[2]) != (panels.shape[0], PANEL) or depth % (x.shape[1] * block):
            raise ValueError(
                f"{name}: the shape {x.shape} is not that of {panels.shape[0]} panels and groups of whole {block}s of "
                f"{depth} inputs"
            )
