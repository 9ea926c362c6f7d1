"""The 6-bit form of a kernel, which is GGUF's `Q6_K`: 6 bits for each weight, a scale of 8 bits for each output and 16
neighbouring inputs, and a float16 unit of the scales for each output and 256 inputs.

A weight is `(kernel + 8 + 16 * upper - 32) * scale * scale_unit`. `kernel` has the lower four bits. Like the kernel of
a 4-bit form, it is `jnp.int4`, and it is packed in the same way. `kernel_upper` has the upper two bits: a byte holds
those of four neighbouring inputs, and the first input has the lowest bits. The C code of `pallas_kernels.cpu.four_bit`
multiplies with both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from model.network.four_bit import multiply_groups, round_blocks
from model.network.linear_method import Axes, LinearMethod, Weights
from model.quantization.forms import Rounding, SixBit
from pallas_kernels.cpu import four_bit

LEAST = -32  # the least value; the largest is 31
LARGEST_SCALE = 127
_GROUPS_OF_A_UNIT = SixBit.whole // SixBit.group
_SHIFTS = np.arange(0, 8, 2, dtype=np.uint8)  # where the upper bits of four inputs are in their byte


@dataclass(frozen=True)
class SixBitMethod(LinearMethod):
    """A kernel in two parts, with scales [out, in / 16] and their units [out, in / 256]. All are split in the same way.

    Args:
        rounding: if given, inputs are rounded (`four_bit.round_blocks`); None: they keep their type.
    """

    form: SixBit
    rounding: Rounding | None = None

    def quantize(self, kernel: jax.Array) -> dict[str, jax.Array]:
        return quantize(kernel)

    def create(self, kernel: jax.Array, axes: Axes) -> dict[str, tuple[jax.Array, Axes]]:
        return {name: (value, axes) for name, value in self.quantize(kernel).items()}

    def apply(self, inputs: jax.Array, weights: Weights, out_dtype: Any) -> jax.Array:
        kernel, upper, rounds = weights["kernel"], weights["kernel_upper"], self.rounding is not None
        if kernel.ndim == 3:
            scales = {name: weights[name] for name in ("scale", "scale_unit")}
            return four_bit.multiply(inputs, kernel, **scales, high=upper, round_inputs=rounds, out_dtype=out_dtype)
        inputs = round_blocks(inputs) if rounds else inputs.astype(jnp.float32)
        return multiply_groups(inputs, joined(kernel, upper), scale_of(weights)).astype(out_dtype)

    def can_pack(self, kernel: jax.Array | jax.ShapeDtypeStruct) -> bool:
        return four_bit.can_pack_six(kernel.shape)

    def pack(self, name: str, value: jax.Array) -> jax.Array:
        if name == "kernel":
            return four_bit.pack(value)
        return _pack_upper(value) if name == "kernel_upper" else four_bit.pack_groups(value)


def quantize(weights: jax.Array) -> dict[str, jax.Array]:
    """weights [out, in] of any float type -> the parameters, by name.

    Each weight is rounded to the nearest multiple of its scale. The weight of the largest magnitude in a group is -32
    times the scale. Scales are rounded to 8 bits first. A group with a non-finite weight gets numbers that are not
    finite.
    """
    grouped = weights.astype(jnp.float32).reshape(weights.shape[0], -1, SixBit.group)
    high, low = (extreme(grouped, axis=2) for extreme in (jnp.max, jnp.min))
    scale = (jnp.where(high >= -low, high, low) * (1 / LEAST)).reshape(weights.shape[0], -1, _GROUPS_OF_A_UNIT)
    largest = jnp.max(jnp.abs(scale), axis=2, keepdims=True)
    unit = (largest * np.float32(1 / LARGEST_SCALE)).astype(jnp.float16)
    steps = jnp.round(scale / jnp.where(unit == 0, 1.0, unit.astype(jnp.float32)))
    whole = jnp.clip(steps, -LARGEST_SCALE, LARGEST_SCALE).astype(jnp.int8).reshape(weights.shape[0], -1)
    made = {"scale": whole, "scale_unit": unit[:, :, 0]}
    divisor = scale_of(made)[:, :, None]
    values = jnp.clip(jnp.round(grouped / jnp.where(divisor == 0, 1.0, divisor)), LEAST, -LEAST - 1)
    return cut(values.astype(jnp.int8).reshape(weights.shape)) | made


def cut(values: jax.Array) -> dict[str, jax.Array]:
    """Splits i8[out, in], -32 to 31, into `kernel` i4[out, in] and `kernel_upper` u8[out, in / 4]."""
    stored = (values - LEAST).astype(jnp.uint8)
    upper = (stored >> 4).reshape(values.shape[0], -1, len(_SHIFTS)) << _SHIFTS
    kernel = (stored & 15).astype(jnp.int8) - four_bit.MIDDLE
    return {"kernel": kernel.astype(jnp.int4), "kernel_upper": jnp.sum(upper, axis=2, dtype=jnp.uint8)}


def joined(kernel: jax.Array, upper: jax.Array) -> jax.Array:
    """The values i8[out, in], -32 to 31, that `cut` has split."""
    return kernel.astype(jnp.int8) + four_bit.MIDDLE + LEAST + _upper_bits(upper) * 16


def scale_of(weights: Weights) -> jax.Array:
    """The exact scales, f32[out, in / 16]."""
    units = jnp.repeat(weights["scale_unit"].astype(jnp.float32), _GROUPS_OF_A_UNIT, axis=1)
    return weights["scale"].astype(jnp.float32) * units


def _upper_bits(upper: jax.Array) -> jax.Array:
    """u8[out, in / 4] -> i8[out, in], 0 to 3."""
    return (upper[:, :, None] >> _SHIFTS & 3).astype(jnp.int8).reshape(upper.shape[0], -1)


@jax.jit
def _pack_upper(upper: jax.Array) -> jax.Array:
    """The upper bits as the C code reads them. `four_bit.pack_six` packs them; it ignores the lower bits here."""
    _, high = four_bit.pack_six(_upper_bits(upper) * 16 + LEAST)
    return high
