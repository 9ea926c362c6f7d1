"""Products of int8 with inputs rounded to int8 in C, bit for bit against a model in numpy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.network.eight_bit import LEAST_RANGE, multiply_rounded
from pallas_kernels.cpu import products
from pallas_kernels.cpu.products import PANEL, TOGETHER_ROUNDED
from tests.pallas_kernels.cpu.test_four_bit import inputs_of as inputs_of_parts

pytestmark = pytest.mark.usefixtures("target")

ONE = np.float32(1)


def kernel_of(num_out: int, depth: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """i8[out, in] with its scales. Quantised checkpoints also hold -128."""
    rng = np.random.default_rng(seed)
    kernel = rng.integers(-128, 128, (num_out, depth)).astype(np.int8)
    return kernel, rng.uniform(1e-3, 1e-2, num_out).astype(np.float32)


def inputs_of(rows: int, depth: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    """Rows of different sizes, with many values halfway between two integers of their row."""
    return inputs_of_parts(rows, depth, dtype, seed, part=depth)


def model(
    inputs: np.ndarray, kernel: np.ndarray, scale: np.ndarray, stored: np.float32 | None, dtype: Any = np.float32
) -> np.ndarray:
    wide = inputs.astype(np.float32)
    largest = np.maximum(np.abs(wide).max(axis=1, keepdims=True), LEAST_RANGE)
    factor = np.float32(127) / largest if stored is None else ONE / stored
    narrow = np.rint(np.clip(wide * factor, -127, 127)).astype(np.int64)
    of_row = largest * np.float32(1 / 127) if stored is None else stored
    return ((narrow @ kernel.T.astype(np.int64)).astype(np.float32) * scale * of_row).astype(dtype)


def product(
    inputs: np.ndarray, kernel: np.ndarray, scale: np.ndarray, stored: np.float32 | None = None, dtype: Any = np.float32
) -> np.ndarray:
    # Traced anew: under another target the custom call has another name.
    multiply = jax.jit(lambda *x: products.multiply_rounded(*x, out_dtype=dtype))
    input_scale = None if stored is None else jnp.asarray(stored)
    return np.asarray(multiply(inputs, products.pack(jnp.asarray(kernel), TOGETHER_ROUNDED), scale, input_scale))


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_rows_of_zeros_at_the_end_are_not_multiplied(dtype):
    """Zero times infinity is not a number, so a row that is multiplied shows."""
    rng = np.random.default_rng(0)
    kernel, scale = rng.integers(-127, 128, (PANEL, 64)).astype(np.int8), np.ones(PANEL, np.float32)
    inputs = rng.standard_normal((30, 64)).astype(dtype)
    scale[0] = np.inf
    inputs[2], inputs[7:], inputs[12:] = 0, 0, -0.0
    found = product(inputs, kernel, scale)
    np.testing.assert_array_equal(found[:7], product(inputs[:7], kernel, scale))
    assert np.isnan(found[2, 0]) and (found[7:] == 0).all()


@settings(max_examples=15)
@given(
    rows=st.integers(1, 300),
    quads=st.integers(1, 600),
    panels=st.integers(1, 9),
    dtypes=st.tuples(*[st.sampled_from([np.float32, jnp.bfloat16])] * 2),
    stored=st.sampled_from([None, np.float32(0.01), np.float32(3)]),
    seed=st.integers(0, 99),
)
def test_it_is_the_product_of_the_rounded_inputs(rows, quads, panels, dtypes, stored, seed):
    depth = TOGETHER_ROUNDED * quads
    kernel, scale = kernel_of(panels * PANEL, depth, seed)
    inputs = inputs_of(rows, depth, dtypes[0], seed)
    wanted = model(inputs, kernel, scale, stored, dtypes[1])
    np.testing.assert_array_equal(product(inputs, kernel, scale, stored, dtypes[1]), wanted)


@pytest.mark.parametrize("sign", [-1, 1])
def test_the_largest_sums(sign):
    """All weights are -128 or 127, all inputs are the largest: an instruction that saturates would show."""
    kernel = np.full((PANEL, 28672), -128, np.int8)
    kernel[1::2] = 127
    inputs, scale = np.full((13, 28672), sign * 127, np.float32), np.ones(PANEL, np.float32)
    np.testing.assert_array_equal(product(inputs, kernel, scale, ONE), model(inputs, kernel, scale, ONE))


@pytest.mark.parametrize("multiplies", ["C", "XLA"])
def test_inputs_may_be_large(multiplies):
    """The products fit in float32, though the largest sum times the scale of the inputs does not."""
    kernel, scale = kernel_of(PANEL, 64)
    inputs = np.float32(1e36) * np.sign(kernel[:4]).astype(np.float32)  # as int8, 127 and -127
    found = product(inputs, kernel, scale) if multiplies == "C" else multiply_rounded(inputs, kernel, scale)
    sums = 127 * np.sign(kernel[:4]).astype(np.float64) @ kernel.T
    assert sums.max() * 1e36 / 127 > np.finfo(np.float32).max
    np.testing.assert_allclose(found, sums * 1e36 / 127 * scale, rtol=1e-6)


def test_it_rounds_as_the_products_of_chips_do():
    kernel, scale = kernel_of(2 * PANEL, 200)
    inputs = inputs_of(40, 200)
    found = np.asarray(jax.jit(multiply_rounded)(inputs, kernel, scale))
    np.testing.assert_array_equal(product(inputs, kernel, scale), found)


@pytest.mark.parametrize("depth", [1200, 4096])  # the latter's rows are copied with gaps
@pytest.mark.parametrize("stored", [None, np.float32(0.03)])
def test_the_bits_of_a_row_do_not_depend_on_the_others(stored, depth):
    kernel, scale = kernel_of(70 * PANEL, depth)
    inputs = inputs_of(300, depth)
    whole = product(inputs, kernel, scale, stored)
    for rows in (1, 2, 3, 4, 5, 8, 11, 12, 13, 24, 25, 96, 97, 193):
        np.testing.assert_array_equal(product(inputs[-rows:], kernel, scale, stored), whole[-rows:])


@pytest.mark.parametrize("stored", [None, ONE])
def test_zeros_stay_zeros_and_what_is_not_a_number_shows_in_its_own_row(stored):
    kernel, scale = kernel_of(PANEL, 64)
    inputs = inputs_of(5, 64)
    inputs[0], inputs[1, 3], inputs[2, 5], inputs[3, 7] = 0, np.nan, np.inf, 1e-42
    found = product(inputs, kernel, scale, stored)
    assert (found[0] == 0).all() and np.isnan(found[1]).all() and np.isfinite(found[3:]).all()
    assert np.isfinite(found[2]).all() == (stored is not None)  # clipped, if there is a stored scale
