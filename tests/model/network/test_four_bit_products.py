"""Products with 4-bit kernels against float64 products with the dequantised kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.network.four_bit import multiply_groups
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
