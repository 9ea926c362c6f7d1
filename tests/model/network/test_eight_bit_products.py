"""Products with rounded inputs against a model in numpy of the same rounding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from model.network.eight_bit import multiply_rounded
from model.network.linear import Linear
from model.network.llama import Llama
from model.quantization.forms import EightBit, Rounding
from tests.model.network.test_llama import TINY

NUMPY = {EightBit.INT8: np.int8, EightBit.FP8: ml_dtypes.float8_e4m3fn}
WIDTH = 80

multiply = jax.jit(lambda inputs, kernel: multiply_rounded(inputs, kernel, jnp.ones(len(kernel))))


def make(form: EightBit, rounding: Rounding | None) -> Linear:
    axes = ("mlp", "embed")
    return Linear((48, WIDTH), axes, dtype=jnp.float32, rngs=nnx.Rngs(1), quantization=form, rounding=rounding)


def inputs_of(rows: int, seed: int = 0) -> np.ndarray:
    spread = np.random.default_rng(seed).standard_normal((rows, WIDTH))
    return (spread * np.exp(3 * np.random.default_rng(seed + 1).standard_normal((rows, 1)))).astype(np.float32)


def rounded(scaled: np.ndarray, form: EightBit) -> np.ndarray:
    clipped = np.clip(scaled, -form.largest, form.largest)
    return (np.rint(clipped) if form is EightBit.INT8 else clipped).astype(NUMPY[form]).astype(np.float64)


def product(narrow: np.ndarray, linear: Linear, scale: np.ndarray | np.float32) -> np.ndarray:
    weights = np.asarray(linear.kernel[...]).astype(np.float64) * np.asarray(linear.scale[...], np.float64)[:, None]
    return narrow @ weights.T * scale


@pytest.mark.parametrize("form", EightBit)
@pytest.mark.parametrize("rows", [1, 16, 33])
def test_every_token_is_rounded_with_its_own_scale(form, rows):
    linear, inputs = make(form, Rounding()), inputs_of(rows)
    largest = np.abs(inputs).max(axis=1, keepdims=True)
    narrow = rounded(inputs * (np.float32(form.largest) / largest), form)
    wanted = product(narrow, linear, largest * np.float32(1 / form.largest))
    tolerance = 1e-6 * np.abs(wanted).max(axis=1, keepdims=True)
    assert (np.abs(np.asarray(linear(inputs)) - wanted) <= tolerance).all()


@pytest.mark.parametrize("form", EightBit)
def test_a_stored_scale_is_used_as_it_is_and_larger_inputs_are_clipped(form):
    linear, inputs = make(form, Rounding(is_static=True)), inputs_of(17)
    scale = np.float32(0.25 * np.abs(inputs).max() / form.largest)
    linear.input_scale.set_value(jnp.asarray(scale))
    wanted = product(rounded(inputs * (np.float32(1) / scale), form), linear, scale)
    np.testing.assert_allclose(np.asarray(linear(inputs)), wanted, atol=1e-6 * np.abs(wanted).max())


@pytest.mark.parametrize("form", EightBit)
@pytest.mark.parametrize("rows", [5, 16, 40])
def test_a_tokens_bits_do_not_depend_on_the_other_tokens(form, rows):
    kernel = make(form, None).kernel[...]
    inputs, others = inputs_of(rows), 1e4 * inputs_of(rows, seed=7)
    alone = np.asarray(multiply(inputs, kernel))
    for row in range(0, rows, 4):
        shared = others.copy()
        shared[row] = inputs[row]
        np.testing.assert_array_equal(np.asarray(multiply(shared, kernel))[row], alone[row])


@pytest.mark.parametrize("form", EightBit)
def test_zeros_stay_zeros_and_what_is_not_finite_shows_in_its_own_row(form):
    linear, inputs = make(form, Rounding()), inputs_of(4)
    inputs[0], inputs[1, 3], inputs[2, 5] = 0, np.nan, np.inf
    found = np.asarray(linear(inputs))
    assert (found[0] == 0).all() and not np.isfinite(found[1:3]).any() and np.isfinite(found[3]).all()


def test_products_of_few_rows_keep_the_activations():
    exact, late = make(EightBit.INT8, None), make(EightBit.INT8, Rounding(min_rows=9))
    inputs = inputs_of(9)
    np.testing.assert_array_equal(late(inputs[:8]), exact(inputs[:8]))
    assert (np.asarray(late(inputs)) != np.asarray(exact(inputs))).any()


@pytest.mark.parametrize("with_head", [False, True])
def test_the_head_is_rounded_only_if_asked_and_has_no_stored_scale(with_head):
    rounding = Rounding(is_static=True, with_head=with_head)
    model = Llama(TINY, dtype=jnp.float32, rngs=nnx.Rngs(0), quantization=EightBit.FP8, rounding=rounding)
    assert "input_scale" in model.layers[0].mlp.down.parameters()
    assert model.head is not None and "input_scale" not in model.head.parameters()
    assert (model.head.method.rounding is not None) == with_head
