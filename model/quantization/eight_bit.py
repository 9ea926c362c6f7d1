"""The 8-bit form of a kernel: one number of 8 bits for each weight and one float32 scale for each row of outputs.

A weight is `kernel * scale`. Each output has one scale, so a product is scaled after its sum. Rows of fused projections
keep their own scales. Scales are split over chips in the same way as the outputs.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from model.quantization.forms import EightBit


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


def dequantize(kernel: jax.Array, scale: jax.Array) -> jax.Array:
    """f32[out, in]"""
    return kernel.astype(jnp.float32) * scale[:, None]
