"""The 8-bit form against numpy's own rounding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.network.eight_bit import quantize
from model.quantization.forms import EightBit
from tests.examples import examples
from tests.model.dequantized import dequantize

NUMPY = {EightBit.INT8: np.int8, EightBit.FP8: ml_dtypes.float8_e4m3fn}


@pytest.mark.parametrize("form", EightBit)
@settings(max_examples=examples(25))
@given(seed=st.integers(0, 1 << 32), exponent=st.integers(-20, 20))
def test_each_weight_is_the_nearest_multiple_of_its_rows_scale(form, seed, exponent):
    weights = np.random.default_rng(seed).standard_normal((6, 40)).astype(np.float32) * np.float32(2.0**exponent)
    kernel, scale = jax.jit(quantize, static_argnums=1)(weights, form)
    wanted = np.abs(weights).max(axis=1) * np.float32(1 / form.largest)
    np.testing.assert_array_equal(scale, wanted)
    scaled = weights / wanted[:, None]
    scaled = np.rint(scaled) if form is EightBit.INT8 else scaled
    np.testing.assert_array_equal(np.asarray(kernel), scaled.astype(NUMPY[form]))
    # Half a step: of 127 steps, or of the three bits of e4m3's fraction.
    error = np.abs(dequantize(kernel, scale) - weights)
    step = wanted[:, None] if form is EightBit.INT8 else np.maximum(np.abs(weights) / 8, wanted[:, None] * 2.0**-9)
    assert (error <= step * 0.5001).all()


@pytest.mark.parametrize("form", EightBit)
def test_a_row_of_zeros_stays_zero_and_one_that_is_not_finite_shows(form):
    weights = jnp.array([[0.0, 0.0], [1.0, jnp.nan], [jnp.inf, 1.0], [3.0, -1.5]], jnp.bfloat16)
    values = np.asarray(dequantize(*quantize(weights, form)))
    np.testing.assert_array_equal(values[0], [0, 0])
    assert not np.isfinite(values[1:3]).all(axis=1).any()
    np.testing.assert_allclose(values[3], [3, -1.5], rtol=0.05)
