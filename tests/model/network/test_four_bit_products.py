"""Products with 4-bit kernels against float64 products with the dequantised kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model.network.four_bit import multiply_groups
from model.network.linear import Linear
from model.quantization.forms import FourBit
from tests.model.dequantized import dequantize_groups

SHAPE = (48, 96)


def operands(has_zeros: bool, rows: int, dtype):
    rng = np.random.default_rng(rows)
    kernel = jnp.asarray(rng.integers(-8, 8, SHAPE), jnp.int4)
    scale = jnp.asarray(rng.uniform(-0.1, 0.1, (48, 3)), jnp.bfloat16)
    zero = jnp.asarray(rng.integers(-8, 8, (48, 3)), jnp.bfloat16) if has_zeros else None
    inputs = jnp.asarray(rng.standard_normal((rows, 96)) + 1, dtype)
    return inputs, kernel, scale, zero


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_products_are_those_of_the_dequantised_kernel(rows, has_zeros, dtype):
    inputs, kernel, scale, zero = operands(has_zeros, rows, dtype)
    found = np.asarray(jax.jit(multiply_groups)(inputs, kernel, scale, zero))
    assert found.dtype == np.float32
    wanted = np.asarray(inputs, np.float64) @ np.asarray(dequantize_groups(kernel, scale, zero), np.float64).T
    terms = np.abs(np.asarray(inputs, np.float64)) @ np.abs(np.asarray(dequantize_groups(kernel, scale), np.float64)).T
    # In bfloat16 each weight is rounded to 8 bits.
    np.testing.assert_array_less(np.abs(found - wanted), terms * (1e-5 if dtype == jnp.float32 else 2.0**-8))


def test_a_linear_keeps_scales_and_zeros_with_its_kernel():
    form = FourBit(group=32, has_zeros=True)
    axes = ("embed", "mlp")
    linear = Linear(SHAPE, axes, dtype=jnp.bfloat16, rngs=nnx.Rngs(0), quantization=form)
    for name, shape, dtype in (("kernel", SHAPE, jnp.int4), ("scale", (48, 3), jnp.bfloat16),
                               ("zero", (48, 3), jnp.bfloat16)):  # fmt: skip
        param = getattr(linear, name)
        assert (param.shape, param.dtype, param.get_metadata("axes")) == (shape, dtype, axes)
    inputs, kernel, scale, zero = operands(True, 5, jnp.bfloat16)
    for name, value in (("kernel", kernel), ("scale", scale), ("zero", zero)):
        getattr(linear, name).set_value(value)
    wide = linear(inputs, out_dtype=jnp.float32)
    np.testing.assert_array_equal(wide, multiply_groups(inputs, kernel, scale, zero))
    np.testing.assert_array_equal(linear(inputs), wide.astype(jnp.bfloat16))
