"""Products with 4-bit kernels whose groups of inputs have scales of their own.

XLA's GPU compiler dequantises inside the product, if the kernel is multiplied with its scales in bfloat16, and if the
option for sub-channel dequantisation is set (`compiler_options`). It has no such form for zeros that are subtracted
from the weights. Their part is subtracted afterwards: it is a product of the sums of each group's inputs.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

_LAST = (((1,), (1,)), ((), ()))


def multiply_groups(inputs: jax.Array, kernel: jax.Array, scale: jax.Array, zero: jax.Array | None) -> jax.Array:
    """inputs [T, in] times the transpose of a kernel int4[out, in]: f32[T, out].

    Weights are rounded to the inputs' type, as are weights that are not quantised.

    Args:
        scale: bf16[out, in / group].
        zero: bf16[out, in / group], in units of the scale; None: there are none.
    """
    num_out, groups = scale.shape
    precision = lax.Precision.HIGHEST if inputs.dtype == jnp.float32 else None
    scale = scale.astype(inputs.dtype)
    wide = kernel.astype(inputs.dtype).reshape(num_out, groups, -1) * scale[:, :, None]
    product = lax.dot_general(
        inputs, wide.reshape(num_out, -1), _LAST, precision=precision, preferred_element_type=jnp.float32
    )
    if zero is None:
        return product
    sums = jnp.sum(inputs.astype(jnp.float32).reshape(-1, groups, inputs.shape[1] // groups), axis=2)
    offset = zero.astype(jnp.float32) * scale.astype(jnp.float32)
    return product - lax.dot_general(sums, offset, _LAST, precision=precision)
