"""Packed products in C against float64, on this CPU's vectors and on narrower ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.cpu import products
from pallas_kernels.cpu.products import PANEL

pytestmark = pytest.mark.usefixtures("target")

KINDS = ("float32", "int8")


def random_kernel(shape: tuple[int, int], kind: str, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if kind == "int8":
        return rng.integers(-127, 128, shape).astype(np.int8)
    return rng.standard_normal(shape).astype(np.float32)


def product(inputs: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    # Traced anew: under another target the custom call has another name.
    return np.asarray(jax.jit(lambda *x: products.multiply(*x))(inputs, products.pack(jnp.asarray(kernel))))


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=15)
@given(rows=st.integers(1, 300), depth=st.integers(1, 700), panels=st.integers(1, 9), seed=st.integers(0, 99))
def test_it_is_the_product(kind, rows, depth, panels, seed):
    kernel = random_kernel((panels * PANEL, depth), kind, seed)
    inputs = np.random.default_rng(seed).standard_normal((rows, depth)).astype(np.float32)
    expected = inputs.astype(np.float64) @ kernel.T.astype(np.float64)
    largest = np.abs(inputs).astype(np.float64) @ np.abs(kernel).T.astype(np.float64)
    # the bound of a sum of `depth` products in float32
    assert (np.abs(product(inputs, kernel) - expected) <= depth * 2.0**-24 * largest).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_of_a_row_do_not_depend_on_the_others(kind):
    kernel = random_kernel((70 * PANEL, 600), kind)
    inputs = np.random.default_rng(1).standard_normal((300, 600)).astype(np.float32)
    whole = product(inputs, kernel)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 24, 25, 96, 97, 193):
        np.testing.assert_array_equal(product(inputs[-rows:], kernel), whole[-rows:])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_packed_kernel(kind):
    kernel = random_kernel((3 * PANEL, 40), kind)
    panels, rows = products.pack(jnp.asarray(kernel)), np.array([0, 95, 31, 32, 64])
    np.testing.assert_array_equal(products.rows_of(panels, rows), kernel[rows])
    assert products.rows_of(panels, np.array([-1, 96, 1 << 30])).shape == (3, 40)


def test_what_has_a_packed_form():
    like = jax.ShapeDtypeStruct
    assert products.can_pack(like((64, 5), jnp.float32))
    assert products.can_pack(like((64, 5), jnp.int8))
    assert not products.can_pack(like((65, 5), jnp.float32))
    assert not products.can_pack(like((64, 5), jnp.bfloat16))
    assert not products.can_pack(like((64,), jnp.float32))
