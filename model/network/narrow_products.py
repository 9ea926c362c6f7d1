"""Products of which both sides have 8 bits: the inputs are rounded inside the program. Matrix units multiply int8 or
fp8 faster than bfloat16.

Every token has its own scale, or all tokens have a stored one. The result of a token does not depend on the other
tokens of the step. Sums of int8 are exact integers, so their bits do not depend on the number of rows, either.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from model.quantization.forms import EightBit

MIN_ROWS = 16  # GPUs: as a product with a vector, XLA would write the kernel in float32 first
LEAST_RANGE = np.float32(1e-30)  # of a token's inputs; the quotient of two float32 stays finite


def multiply_narrow(inputs: jax.Array, kernel: jax.Array, input_scale: jax.Array | None = None) -> jax.Array:
    """inputs [T, in] times the transpose of an 8-bit kernel [out, in]: f32[T, out] without the kernel's scale.

    Args:
        input_scale: f32[], of all inputs; larger inputs are clipped. None: each token has its own scale.
    """
    rows, form = inputs.shape[0], EightBit.of(kernel.dtype)
    inputs = jnp.pad(inputs, ((0, max(0, MIN_ROWS - rows)), (0, 0)))
    if input_scale is None:
        narrow, scale = round_rows(inputs, form)
    else:
        narrow, scale = _round(inputs * (1 / input_scale), form), input_scale
    sums = lax.dot_general(
        narrow,
        kernel,
        (((1,), (1,)), ((), ())),
        preferred_element_type=jnp.int32 if form is EightBit.INT8 else jnp.float32,
    )
    return (sums.astype(jnp.float32) * scale)[:rows]


def round_rows(inputs: jax.Array, form: EightBit) -> tuple[jax.Array, jax.Array]:
    """inputs [T, in] -> [T, in] of `form`, scale f32[T, 1]. A row that is not finite gets a scale that is not."""
    largest = jnp.max(jnp.abs(inputs), axis=1, keepdims=True).astype(jnp.float32)
    largest = jnp.maximum(largest, LEAST_RANGE)
    factor = np.float32(form.largest) / largest
    return _round(inputs.astype(jnp.float32) * factor, form), largest * np.float32(1 / form.largest)


def _round(scaled: jax.Array, form: EightBit) -> jax.Array:
    """To nearest even, within the range."""
    clipped = jnp.clip(scaled.astype(jnp.float32), -form.largest, form.largest)
    return (jnp.round(clipped) if form is EightBit.INT8 else clipped).astype(form.dtype)
