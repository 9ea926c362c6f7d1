"""Packed products in C against float64, on this CPU's vectors and on narrower ones."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.cpu import products
from pallas_kernels.cpu.products import PANEL

pytestmark = pytest.mark.usefixtures("target")

KINDS = {kind: jnp.dtype(kind) for kind in ("float32", "bfloat16", "int8")}
UNIT = 2.0**-24  # of rounding in float32


def random_kernel(shape: tuple[int, int], kind: str, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if kind == "int8":
        return rng.integers(-127, 128, shape).astype(np.int8)
    return rng.standard_normal(shape).astype(KINDS[kind])


def random_inputs(shape: tuple[int, int], kind: str, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(jnp.bfloat16 if kind == "bfloat16" else np.float32)


def product(inputs: np.ndarray, kernel: np.ndarray, out_dtype: Any = jnp.float32) -> np.ndarray:
    # Traced anew: under another target the custom call has another name.
    multiply = jax.jit(lambda *x: products.multiply(*x, out_dtype))
    return np.asarray(multiply(inputs, products.pack(jnp.asarray(kernel))))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8)
@given(rows=st.integers(1, 300), pairs=st.integers(1, 700), panels=st.integers(1, 9), seed=st.integers(0, 99))
def test_it_is_the_product(kind, rows, pairs, panels, seed):
    depth = pairs * 2 if kind == "bfloat16" else pairs
    kernel = random_kernel((panels * PANEL, depth), kind, seed)
    inputs = random_inputs((rows, depth), kind, seed)
    expected = inputs.astype(np.float64) @ kernel.T.astype(np.float64)
    largest = np.abs(inputs.astype(np.float64)) @ np.abs(kernel.T.astype(np.float64))
    # the bound of a sum of `depth` products in float32
    assert (np.abs(product(inputs, kernel) - expected) <= depth * UNIT * largest).all()


@pytest.mark.parametrize("kind", KINDS)
def test_scales_of_the_outputs(kind):
    inputs, kernel = random_inputs((30, 66), kind), random_kernel((5 * PANEL, 66), kind)
    scale = np.random.default_rng(1).uniform(1e-3, 1e2, 5 * PANEL).astype(np.float32)
    multiply = jax.jit(lambda x, panels, scale: products.multiply(x, panels, jnp.bfloat16, scale))
    found = np.asarray(multiply(inputs, products.pack(jnp.asarray(kernel)), scale))
    np.testing.assert_array_equal(found, (product(inputs, kernel) * scale).astype(jnp.bfloat16))


@pytest.mark.parametrize("kind", KINDS)
def test_values_at_the_edges_of_a_float(kind):
    """Sums halfway between two bfloat16s, infinite ones, and not a number."""
    ones = np.ones((PANEL, 2)).astype(KINDS[kind])
    sums = np.array(
        [1, 1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 0, np.inf, -np.inf, np.nan, 2.0**127, -(2.0**127)], np.float32
    )
    high = sums.astype(jnp.bfloat16).astype(np.float32)
    low = np.where(np.isfinite(sums), sums, 0) - np.where(np.isfinite(sums), high, 0)
    inputs = np.stack([high, low], axis=1).astype(jnp.bfloat16 if kind == "bfloat16" else np.float32)
    np.testing.assert_array_equal(product(inputs, ones), np.repeat(sums[:, None], PANEL, 1))
    rounded = np.repeat(high[:, None], PANEL, 1)
    np.testing.assert_array_equal(product(inputs, ones, jnp.bfloat16).astype(np.float32), rounded)


@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_of_a_row_do_not_depend_on_the_others(kind):
    kernel, inputs = random_kernel((70 * PANEL, 1200), kind), random_inputs((300, 1200), kind)
    whole = product(inputs, kernel)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 24, 25, 96, 97, 193):
        np.testing.assert_array_equal(product(inputs[-rows:], kernel), whole[-rows:])


@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_of_a_row_do_not_depend_on_the_gaps_between_rows(kind):
    """Rows of whole cache sets are copied with gaps, one row is not. Of a kernel with few panels, and with many."""
    for panels in (3, 65):
        kernel, inputs = random_kernel((panels * PANEL, 2048), kind), random_inputs((110, 2048), kind)
        whole = product(inputs, kernel)
        for row in (0, 57, 109):
            np.testing.assert_array_equal(product(inputs[row : row + 1], kernel), whole[row : row + 1])


@pytest.mark.parametrize("panels", [3, 65])
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_rows_of_zeros_at_the_end_are_not_multiplied(kind, panels):
    """Zero times infinity is not a number, so a row that is multiplied shows."""
    kernel, inputs = random_kernel((panels * PANEL, 2048), kind), random_inputs((30, 2048), kind)
    kernel[0, 0] = np.inf
    inputs[2], inputs[7:], inputs[12:] = 0, 0, -0.0
    found = product(inputs, kernel)
    np.testing.assert_array_equal(found[:7], product(inputs[:7], kernel))
    assert np.isnan(found[2, 0]) and (found[7:] == 0).all()
    found = product(np.zeros_like(inputs), kernel)
    assert np.isnan(found[0, 0]) and (found[1:] == 0).all(), "the first row always is: it reads all weights"
