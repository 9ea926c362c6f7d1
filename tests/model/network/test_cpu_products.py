"""Products of a few rows against numpy in double precision, and that each form is compiled to what it is for."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.compiling.compiler_options import compiler_options
from model.network.cpu_products import MAX_ROWS_FROM_LEFT, max_rows_streamed, multiply_few
from tests.examples import examples

OUT, IN = 48, 80


def compiled(rows: int, dtype, out_dtype, num_out: int = OUT):
    """The program with the options that steps are compiled with."""
    shapes = (jax.ShapeDtypeStruct((rows, IN), dtype), jax.ShapeDtypeStruct((num_out, IN), dtype))
    lowered = jax.jit(lambda x, kernel: multiply_few(x, kernel, out_dtype)).lower(*shapes)
    return lowered.compile(compiler_options=compiler_options("cpu"))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("rows", "num_out"),  # OUT + 2 does not divide into streams
    [(1, OUT), (1, OUT + 2), (2, OUT + 2), (4, OUT), (8, OUT + 2), (16, OUT), (MAX_ROWS_FROM_LEFT, OUT + 2)],
)
def test_products_are_right(rows, dtype, num_out):
    rng = np.random.default_rng(rows)
    inputs = jnp.asarray(rng.standard_normal((rows, IN)), dtype)
    kernel = jnp.asarray(rng.standard_normal((num_out, IN)), dtype)
    product = compiled(rows, dtype, jnp.float32, num_out)(inputs, kernel)
    wanted = np.asarray(inputs, np.float64) @ np.asarray(kernel, np.float64).T
    assert product.shape == (rows, num_out) and product.dtype == jnp.float32
    np.testing.assert_allclose(product, wanted, atol=2e-5)


def test_more_rows_are_left_to_the_plain_product():
    assert multiply_few(jnp.ones((MAX_ROWS_FROM_LEFT + 1, IN)), jnp.ones((OUT, IN)), jnp.float32) is None


@pytest.mark.parametrize(("dtype", "streamed"), [(jnp.float32, 8), (jnp.bfloat16, 2)])
def test_so_many_rows_are_streamed(dtype, streamed):
    assert max_rows_streamed(dtype) == streamed
    for rows in (streamed, streamed + 1):
        text = compiled(rows, dtype, jnp.float32).as_text()
        assert (" reduce(" in text) == (rows == streamed)


@settings(max_examples=examples(25))
@given(rows=st.integers(1, 8), row=st.integers(0, 7), bad=st.sampled_from([np.nan, np.inf, -np.inf]))
def test_what_is_not_finite_stays_in_its_row(rows, row, bad):
    inputs = np.ones((rows, IN), np.float32)
    inputs[row % rows, 3] = bad
    product = np.asarray(compiled(rows, jnp.float32, jnp.float32)(inputs, np.ones((OUT, IN), np.float32)))
    spoilt = np.arange(rows) == row % rows
    assert np.array_equal(product[~spoilt], np.full((rows - 1, OUT), IN, np.float32))
    assert np.array_equal(product[spoilt], np.full((1, OUT), bad, np.float32), equal_nan=True)


def test_the_kernel_is_read_in_place():
    """One loop over the kernel, which no copy of it precedes."""
    text = compiled(4, jnp.float32, jnp.float32).as_text()
    kernels = [line for line in text.splitlines() if re.search(rf"= f32\[(4,{OUT // 4}|{OUT}),{IN}\]", line)]
    assert kernels
    assert all(re.search(r"(parameter|bitcast|slice|multiply|broadcast)\(", line) for line in kernels)
    assert not any(re.search(r"(copy|fusion)\(", line) for line in kernels)
