"""Products with kernels of 4 and 6 bits in C against float64, on this CPU's vectors and on narrower ones."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.cpu import four_bit
from pallas_kernels.cpu.four_bit import BLOCK, FORMS, MIDDLE, MIDDLE_OF_SIX, PART, SIX_BITS, random_groups
from pallas_kernels.cpu.products import PANEL

pytestmark = pytest.mark.usefixtures("target")

UNIT = 2.0**-24  # of rounding in float32
BOTH = pytest.mark.parametrize("round_inputs", [False, True])


def values_of(num_out: int, depth: int, seed: int = 0, form: str = "scales") -> np.ndarray:
    middle = MIDDLE_OF_SIX if form == SIX_BITS else MIDDLE
    return np.random.default_rng(seed).integers(-middle, middle, (num_out, depth)).astype(np.int8)


def inputs_of(rows: int, depth: int, dtype: Any = np.float32, seed: int = 0, part: int = PART) -> np.ndarray:
    """Rows of different sizes, with many values halfway between two integers of their part."""
    rng = np.random.default_rng(seed)
    halves = rng.integers(-254, 255, (rows, depth)) / 2
    halves[:, ::part] = 127
    free = rng.standard_normal((rows, depth))
    size = np.exp2(rng.integers(-20, 20, (rows, 1)))
    return (np.where(rng.random((rows, 1)) < 0.5, halves, free) * size).astype(dtype)


def rounded(inputs: np.ndarray) -> np.ndarray:
    """Inputs as they are multiplied once they are int8, in float64."""
    found = np.empty(inputs.shape)
    for first in range(0, inputs.shape[1], PART):
        part = inputs[:, first : first + PART].astype(np.float32)
        largest = np.maximum(np.abs(part).max(axis=1, keepdims=True), np.float32(1e-30))
        narrow = np.rint(np.clip(part * (np.float32(127) / largest), -127, 127))
        found[:, first : first + PART] = narrow.astype(np.float64) * (largest * np.float32(1 / 127))
    return found


def product(
    inputs: np.ndarray,
    values: np.ndarray,
    numbers: dict[str, np.ndarray],
    *,
    round_inputs: bool,
    dtype: Any = np.float32,
) -> np.ndarray:
    def multiply(inputs: jax.Array, values: jax.Array, numbers: dict[str, jax.Array]) -> jax.Array:
        packed = four_bit.pack_all(values, numbers)
        return four_bit.multiply(inputs, **packed, round_inputs=round_inputs, out_dtype=dtype)

    return np.asarray(jax.jit(multiply)(inputs, values, numbers))  # traced anew, as the custom call has another name


@BOTH
@settings(max_examples=8)
@given(
    form=st.sampled_from(sorted(FORMS)),
    rows=st.integers(1, 150),
    blocks=st.integers(1, 30) | st.sampled_from([8, 16, 24]),
    panels=st.integers(1, 5),
    dtypes=st.tuples(*[st.sampled_from([np.float32, jnp.bfloat16])] * 2),
    seed=st.integers(0, 99),
)
def test_it_is_the_product(round_inputs, form, rows, blocks, panels, dtypes, seed):
    rng = np.random.default_rng(seed)
    group = BLOCK * int(rng.choice([n for n in range(1, blocks + 1) if blocks % n == 0]))
    if form == SIX_BITS:
        group //= int(rng.integers(1, 3))
    depth = blocks * BLOCK
    values, inputs = values_of(panels * PANEL, depth, seed, form), inputs_of(rows, depth, dtypes[0], seed)
    numbers, weights = random_groups(form, values, group, rng, unit_group=depth if depth % PART else PART)
    wide = rounded(inputs) if round_inputs else inputs.astype(np.float64)
    expected, largest = wide @ weights.T, np.abs(wide) @ (np.abs(weights) + 16 * np.abs(weights).max()).T
    found = product(inputs, values, numbers, round_inputs=round_inputs, dtype=dtypes[1])
    of_output = 0 if dtypes[1] == np.float32 else 2.0**-8 * np.abs(expected)
    assert (np.abs(found - expected) <= (PART + blocks) * UNIT * largest + of_output).all()


@BOTH
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_more_outputs_than_a_cache_has(dtype, round_inputs):
    rows, num_out = 300, 64 * PANEL
    values, inputs = values_of(num_out, BLOCK), inputs_of(rows, BLOCK)
    numbers, weights = random_groups("scales", values, BLOCK, np.random.default_rng(0))
    wide = rounded(inputs) if round_inputs else inputs.astype(np.float64)
    found = product(inputs, values, numbers, round_inputs=round_inputs, dtype=dtype)
    of_output = 0 if dtype == np.float32 else 2.0**-8 * np.abs(wide @ weights.T)
    assert (np.abs(found - wide @ weights.T) <= PART * UNIT * np.abs(wide) @ np.abs(weights).T + of_output).all()


@BOTH
@pytest.mark.parametrize("form", FORMS)
def test_every_stored_number_counts_exactly(form, round_inputs):
    """Each row has one input, a power of two, so each output is a weight, within roundings of float32."""
    values = values_of(2 * PANEL, 2 * PART, form=form)
    numbers, weights = random_groups(
        form, values, BLOCK // 2 if form == SIX_BITS else 2 * BLOCK, np.random.default_rng(1), unit_group=PART
    )
    inputs = np.diag(np.exp2(np.arange(2 * PART) % 9 - 4)).astype(np.float32)
    found = product(inputs, values, numbers, round_inputs=round_inputs).astype(np.float64)
    largest = 16 * np.abs(weights).max() * np.diag(inputs)[:, None]
    assert (np.abs(found - inputs.astype(np.float64) @ weights.T) <= 4 * UNIT * largest).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_scales_at_the_edges_of_their_type(dtype):
    """The least and the largest numbers, infinite ones, and not a number."""
    limits = jnp.finfo(dtype)
    least = limits.smallest_subnormal if dtype == "float16" else limits.tiny
    most = float(limits.max) / 2
    edges = np.array([least, -least, limits.tiny, most, -most, 0, np.inf, -np.inf, np.nan]).astype(dtype)
    scale = np.resize(edges, (PANEL, 1))
    inputs = np.zeros((1, BLOCK), np.float32)
    inputs[0, 3] = 2
    found = product(inputs, np.ones((PANEL, BLOCK), np.int8), {"scale": scale}, round_inputs=False)
    np.testing.assert_array_equal(found[0], scale[:, 0].astype(np.float32) * 2)


@pytest.mark.parametrize("group", [BLOCK, 8192])
@pytest.mark.parametrize("sign", [-1, 1])
def test_the_largest_sums(sign, group):
    """An instruction that saturates would show."""
    values = np.full((PANEL, 8192), -8, np.int8)
    values[1::2] = 7
    inputs = np.full((9, 8192), sign * 127, np.float32)
    of_groups = (PANEL, 8192 // group)
    scale, zero = np.ones(of_groups, np.float16), np.zeros(of_groups, np.uint8)
    expected = inputs @ values.T.astype(np.float32)
    np.testing.assert_allclose(product(inputs, values, {"scale": scale}, round_inputs=True), expected, rtol=1e-5)
    found = product(inputs, values, {"scale": scale, "offset": zero}, round_inputs=True)
    np.testing.assert_allclose(found, inputs @ (values.T + np.float32(MIDDLE)), rtol=1e-5, atol=1e-3 * 8192)


@pytest.mark.parametrize("group", [16, PART])
@pytest.mark.parametrize("sign", [-1, 1])
def test_the_largest_sums_of_six_bits(sign, group):
    values = np.full((PANEL, 8192), -32, np.int8)
    values[1::2] = 31
    inputs = np.full((9, 8192), sign * 127, np.float32)
    scale, unit = np.full((PANEL, 8192 // group), -128, np.int8), np.ones((PANEL, 32), np.float16)
    found = product(inputs, values, {"scale": scale, "scale_unit": unit}, round_inputs=True)
    np.testing.assert_allclose(found, inputs @ values.T.astype(np.float32) * -128, rtol=1e-5)


@pytest.mark.parametrize("offset", [None, 255])
@pytest.mark.parametrize("sign", [-1, 1])
def test_the_largest_whole_scales(sign, offset):
    """Products with them are added up in int32, on CPUs that multiply pairs."""
    values, inputs = np.full((PANEL, PART), -8, np.int8), np.full((9, PART), sign * 127, np.float32)
    values[1::2] = 7
    whole, unit = np.full((PANEL, PART // BLOCK), 255, np.uint8), np.ones((PANEL, 1), np.float16)
    offsets = {} if offset is None else {"offset": whole, "offset_unit": unit}
    weights = values * 255.0 if offset is None else (values + MIDDLE) * 255.0 - offset
    found = product(inputs, values, {"scale": whole, "scale_unit": unit, **offsets}, round_inputs=True)
    np.testing.assert_allclose(found, inputs @ weights.T, rtol=1e-6)


@BOTH
@pytest.mark.parametrize("form", FORMS)
def test_the_bits_of_a_row_do_not_depend_on_the_others(form, round_inputs):
    values, inputs = values_of(70 * PANEL, 12 * BLOCK, form=form), inputs_of(150, 12 * BLOCK)
    group = {"zero points": 4 * BLOCK, SIX_BITS: BLOCK // 2}.get(form, BLOCK)
    numbers, _ = random_groups(form, values, group, np.random.default_rng(0))
    whole = product(inputs, values, numbers, round_inputs=round_inputs)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 64, 65, 129):
        found = product(inputs[-rows:], values, numbers, round_inputs=round_inputs)
        np.testing.assert_array_equal(found, whole[-rows:])


@BOTH
def test_zeros_stay_zeros_and_what_is_not_a_number_shows_in_its_own_row(round_inputs):
    values, inputs = values_of(PANEL, 2 * BLOCK), inputs_of(5, 2 * BLOCK)
    numbers, _ = random_groups("units", values, BLOCK, np.random.default_rng(0))
    inputs[0], inputs[1, 3], inputs[2, 40], inputs[3, 7] = 0, np.nan, np.inf, 1e-42
    found = product(inputs, values, numbers, round_inputs=round_inputs)
    assert (found[0] == 0).all() and np.isnan(found[1]).all() and np.isfinite(found[3:]).all()
    assert not np.isfinite(found[2]).any()


@BOTH
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_rows_of_zeros_at_the_end_are_not_multiplied(dtype, round_inputs):
    """Zero times infinity is not a number, so a row that is multiplied shows."""
    values, inputs = values_of(PANEL, 2 * BLOCK), inputs_of(12, 2 * BLOCK, dtype)
    scale = np.ones((PANEL, 2), np.float16)
    scale[0, 0] = np.inf
    inputs[2], inputs[7:], inputs[9:] = 0, 0, -0.0
    found = product(inputs, values, {"scale": scale}, round_inputs=round_inputs)
    of_real = product(inputs[:7], values, {"scale": scale}, round_inputs=round_inputs)
    np.testing.assert_array_equal(found[:7], of_real)
    assert np.isnan(found[2, 0]) and (found[7:] == 0).all()
