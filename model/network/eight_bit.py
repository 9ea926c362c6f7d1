"""The 8-bit forms of a kernel: a number of 8 bits for each weight, and a float32 scale for each output.

A weight is `kernel * scale`. Each output has one scale, so a product is scaled after its sum. Rows of fused projections
keep their own scales. Scales are split over chips in the same way as the outputs.

If the inputs are rounded inside the program, both sides of a product have 8 bits: matrix units multiply int8 or fp8
faster than bfloat16.

The scale of rounded inputs is either computed for each token, or stored and the same for all tokens. The result of a
token does not depend on the other tokens of the step. Sums of int8 are exact integers, so their bits do not depend on
the number of rows, either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from model.network.cpu_products import multiply_int8
from model.network.linear_method import Axes, LinearMethod, Weights, multiply
from model.quantization.forms import EightBit, Rounding
from pallas_kernels.cpu import products

MIN_ROWS = 16  # inputs are padded to this: on GPUs, XLA's product with a vector writes the kernel in float32 first
LEAST_RANGE = np.float32(1e-30)  # the least range of a token's inputs: the quotient of two float32 stays finite


@dataclass(frozen=True)
class EightBitMethod(LinearMethod):
    """An 8-bit kernel with a scale f32[out]. With `rounding.is_static` it also has an `input_scale` f32[]. The scale is
    split over chips in the same way as the outputs."""

    form: EightBit
    rounding: Rounding | None = None
    for_cpu: bool = False

    def can_pack(self, kernel: jax.Array | jax.ShapeDtypeStruct) -> bool:
        """Whether the C code of CPUs reads a kernel [out, in]. Raises ValueError if only some steps round inputs: the C
        code rounds them in all steps or in none."""
        return products.can_pack(kernel, self._together())

    def pack(self, name: str, value: jax.Array) -> jax.Array:
        return products.pack(value, self._together()) if name == "kernel" else value

    def _together(self) -> int | None:
        """The `together` of `products.pack`; None if inputs are not rounded or the kernel is not int8."""
        if self.rounding is None or self.form is not EightBit.INT8:
            return None
        if (rows := self.rounding.min_rows) > 1:
            raise ValueError(f"a CPU rounds inputs in all steps or in none, not from {rows} rows on")
        return products.TOGETHER_ROUNDED

    def quantize(self, kernel: jax.Array) -> dict[str, jax.Array]:
        return dict(zip(("kernel", "scale"), quantize(kernel, self.form), strict=True))

    def create(self, kernel: jax.Array, axes: Axes) -> dict[str, tuple[jax.Array, Axes]]:
        values = self.quantize(kernel)
        created: dict[str, tuple[jax.Array, Axes]] = {
            "kernel": (values["kernel"], axes),
            "scale": (values["scale"], axes[:1]),
        }
        if self.rounding is not None and self.rounding.is_static:
            created["input_scale"] = jnp.ones((), jnp.float32), ()
        return created

    def apply(self, inputs: jax.Array, weights: Weights, out_dtype: Any) -> jax.Array:
        kernel, scale, input_scale = weights["kernel"], weights["scale"], weights.get("input_scale")
        if kernel.ndim == 3 and self.rounding is not None:
            return products.multiply_rounded(inputs, kernel, scale, input_scale, out_dtype)
        if kernel.ndim == 3:
            return products.multiply(inputs, kernel, out_dtype, scale)
        if self.rounding is not None and inputs.shape[0] >= self.rounding.min_rows:
            return multiply_rounded(inputs, kernel, scale, input_scale).astype(out_dtype)
        if self.for_cpu and self.form is EightBit.INT8:
            product = multiply_int8(inputs, kernel)
        else:
            # XLA converts the kernel inside the product: no converted copy of it is written.
            product = multiply(inputs, kernel.astype(inputs.dtype), out_dtype=jnp.float32)
        return (product * scale).astype(out_dtype)


def quantize(weights: jax.Array, form: EightBit) -> tuple[jax.Array, jax.Array]:
    """weights [out, in] of any float type -> kernel [out, in], scale f32[out]. Each weight is rounded to nearest even.

    A row with a non-finite weight gets a non-finite scale: its products are then non-finite, too.
    """
    weights = weights.astype(jnp.float32)
    # XLA may turn a division by a constant into a product. An explicit product gives the same values everywhere.
    scale = jnp.max(jnp.abs(weights), axis=1) * np.float32(1 / form.largest)
    scale = jnp.where(scale == 0, 1.0, scale)  # a row of zeros
    scaled = jnp.clip(weights / scale[:, None], -form.largest, form.largest)
    return (jnp.round(scaled) if form is EightBit.INT8 else scaled).astype(form.dtype), scale


def multiply_rounded(
    inputs: jax.Array, kernel: jax.Array, scale: jax.Array, input_scale: jax.Array | None = None
) -> jax.Array:
    """inputs [T, in] times the transpose of an 8-bit kernel [out, in]: f32[T, out].

    Args:
        scale: the scale f32[out] of the kernel.
        input_scale: the scale f32[] of all inputs; larger inputs are clipped. None: each token has its own scale.
    """
    rows, form = inputs.shape[0], EightBit.of(kernel.dtype)
    inputs = jnp.pad(inputs, ((0, max(0, MIN_ROWS - rows)), (0, 0)))
    if input_scale is None:
        rounded, input_scale = round_rows(inputs, form)
    else:
        rounded = _round(inputs * (1 / input_scale), form)
    sums = lax.dot_general(
        rounded,
        kernel,
        (((1,), (1,)), ((), ())),
        preferred_element_type=jnp.int32 if form is EightBit.INT8 else jnp.float32,
    )
    return (sums.astype(jnp.float32) * scale * input_scale)[:rows]  # `input_scale` is last: it may be of any size


def round_rows(inputs: jax.Array, form: EightBit) -> tuple[jax.Array, jax.Array]:
    """inputs [T, in] -> [T, in] of `form`, scale f32[T, 1]. A row that is not finite gets a scale that is not."""
    largest = jnp.max(jnp.abs(inputs), axis=1, keepdims=True).astype(jnp.float32)
    largest = jnp.maximum(largest, LEAST_RANGE)
    factor = np.float32(form.largest) / largest
    return _round(inputs.astype(jnp.float32) * factor, form), largest * np.float32(1 / form.largest)


def _round(scaled: jax.Array, form: EightBit) -> jax.Array:
    """The values, clipped to the range of `form` and rounded to nearest even."""
    clipped = jnp.clip(scaled.astype(jnp.float32), -form.largest, form.largest)
    return (jnp.round(clipped) if form is EightBit.INT8 else clipped).astype(form.dtype)
