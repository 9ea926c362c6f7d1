"""The 6-bit form against float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from model.network.six_bit import cut, joined, quantize


def weights_of(made) -> np.ndarray:
    """f64[out, in]"""
    values = np.asarray(joined(made["kernel"], made["kernel_upper"]), np.float64)
    scale, unit = (np.asarray(made[name], np.float64) for name in ("scale", "scale_unit"))
    return values * np.repeat(scale, 16, axis=1) * np.repeat(unit, 256, axis=1)


def test_all_numbers_of_6_bits_are_cut_and_joined():
    values = np.arange(-32, 32, dtype=np.int8).reshape(2, 32)
    parts = cut(jnp.asarray(values))
    assert (parts["kernel"].dtype, parts["kernel_upper"].dtype) == (jnp.int4, jnp.uint8)
    np.testing.assert_array_equal(joined(parts["kernel"], parts["kernel_upper"]), values)
    # -28 is stored as 4, or 0b000100; 0 as 32, or 0b100000; 31 as 0b111111.
    np.testing.assert_array_equal(parts["kernel"][0, 4:8].astype(jnp.int8), [4 - 8, 5 - 8, 6 - 8, 7 - 8])
    np.testing.assert_array_equal(parts["kernel_upper"][1, ::4], [0b10101010, 0b11111111])


def test_each_weight_is_near_a_multiple_of_its_groups_scale():
    weights = np.random.default_rng(0).normal(0.1, 1, (6, 512)).astype(np.float32)
    made = jax.jit(quantize)(weights)
    assert {name: (x.shape, x.dtype) for name, x in made.items()} == {
        "kernel": ((6, 512), jnp.int4),
        "kernel_upper": ((6, 128), jnp.uint8),
        "scale": ((6, 32), jnp.int8),
        "scale_unit": ((6, 2), jnp.float16),
    }
    largest = np.abs(weights.reshape(6, -1, 256)).max(axis=2)
    # Half a step of the weights, and what the rounding of the scale moves the largest by.
    bound = np.repeat(largest / 32 * (0.5 + 32 * 0.5 / 127 + 1), 256, axis=1)
    assert (np.abs(weights_of(made) - weights) <= bound).all()
    assert np.abs(weights_of(made) - weights).mean() < 0.02


def test_zeros_stay_zero_and_weights_that_are_not_finite_show():
    weights = np.zeros((3, 256), np.float32)
    weights[1, 7], weights[2, 200] = np.nan, np.inf
    with np.errstate(invalid="ignore"):
        values = weights_of(quantize(jnp.asarray(weights)))
    assert (values[0] == 0).all() and not np.isfinite(values[1]).all() and not np.isfinite(values[2]).all()
