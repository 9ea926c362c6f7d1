"""The int4 product of TPUs, interpreted, against float64 products with the dequantised kernel."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu.int4_product import (
    INPUT_BYTES,
    KERNEL_BYTES,
    MIN_OUT,
    MIN_ROWS,
    Blocks,
    choose_blocks,
    multiply,
)


def operands(rows, num_in, num_out, group, *, has_zeros=False, dtype=jnp.float32):
    rng = np.random.default_rng([rows, num_in, group])
    kernel = jnp.asarray(rng.integers(-8, 8, (num_in, num_out)), jnp.int4)
    scale = jnp.asarray(rng.uniform(-0.1, 0.1, (num_in // group, num_out)), jnp.bfloat16)
    zero = jnp.asarray(rng.uniform(-8, 8, scale.shape), jnp.bfloat16) if has_zeros else None
    return jnp.asarray(rng.standard_normal((rows, num_in)) + 1, dtype), kernel, scale, zero


def check(inputs, kernel, scale, zero, *, blocks=None):
    """Each product is near the exact one, measured by the sum of its terms' magnitudes."""
    interpret = pltpu.InterpretParams(uninitialized_memory="nan")
    found = multiply(inputs, kernel, scale, zero, out_dtype=jnp.float32, blocks=blocks, interpret=interpret)
    group = kernel.shape[0] // scale.shape[0]
    spread = [np.repeat(np.asarray(x, np.float64), group, axis=0) for x in (scale, 0 * scale if zero is None else zero)]
    weights = (np.asarray(kernel, np.float64) - spread[1]) * spread[0]
    wide = np.asarray(inputs, np.float64)
    terms = np.abs(wide) @ ((np.abs(np.asarray(kernel, np.float64)) + np.abs(spread[1])) * np.abs(spread[0]))
    # In bfloat16 a weight is rounded to 8 bits, twice if it has a zero.
    bound = 1e-5 if inputs.dtype == jnp.float32 else 2.0**-8
    assert found.shape == wide.shape[:1] + kernel.shape[1:]
    np.testing.assert_array_less(np.abs(np.asarray(found) - wide @ weights), bound * terms + 1e-30)


@pytest.mark.parametrize(
    ("rows", "group", "has_zeros", "dtype"),
    [
        (1, 128, False, jnp.float32),
        (3, 64, True, jnp.float32),
        (16, 32, False, jnp.bfloat16),
        (16, 32, True, jnp.bfloat16),
        (300, 16, True, jnp.float32),
        (512, 128, False, jnp.bfloat16),
    ],
)
def test_products_are_those_of_the_dequantised_kernel(rows, group, has_zeros, dtype):
    check(*operands(rows, 128, 192, group, has_zeros=has_zeros, dtype=dtype))


@pytest.mark.parametrize("rows", [40, 700])
def test_blocks_that_do_not_divide_the_product(rows):
    """The last block of rows, and of outputs, is partly outside."""
    check(*operands(rows, 128, 200, 32, has_zeros=True), blocks=Blocks(rows=rows // 3, out=128))


@settings(max_examples=200)
@given(
    st.integers(1, 16384),
    st.integers(1, 256).map(lambda n: n * 128),
    st.integers(1, 512).map(lambda n: n * 64),
    st.sampled_from([2, 4]),
)
def test_blocks_fit_in_memory(rows, num_in, num_out, itemsize):
    blocks = choose_blocks(rows, num_in, num_out, itemsize)
    assert 1 <= blocks.rows <= rows and 1 <= blocks.out <= num_out
    assert blocks.rows == rows or blocks.rows % MIN_ROWS == 0
    assert blocks.out == num_out or blocks.out % MIN_OUT == 0
    assert 2 * blocks.rows * num_in * itemsize <= max(INPUT_BYTES, 2 * MIN_ROWS * num_in * itemsize)
    assert num_in * blocks.out * (1 + itemsize) <= max(KERNEL_BYTES, num_in * MIN_OUT * (1 + itemsize))


def test_a_row_does_not_depend_on_the_others():
    inputs, kernel, scale, zero = operands(300, 256, 128, 64, has_zeros=True)
    options = {"out_dtype": jnp.float32, "interpret": True}
    together = multiply(inputs, kernel, scale, zero, **options)
    other = multiply(inputs.at[1:].set(jnp.nan), kernel, scale, zero, **options)
    np.testing.assert_array_equal(together[0], other[0])
