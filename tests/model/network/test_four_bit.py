"""The 4-bit form against numpy's own rounding, and the names of forms."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.network.four_bit import quantize_groups
from model.quantization.forms import (
    EightBit,
    FourBit,
    MixedForms,
    ScaleFormat,
    SixBit,
    described,
    form_named,
    largest_group,
)
from tests.examples import examples
from tests.model.dequantized import dequantize_groups

quantized = jax.jit(quantize_groups, static_argnums=1)


@settings(max_examples=examples(25))
@given(seed=st.integers(0, 1 << 32), exponent=st.integers(-20, 20))
def test_each_weight_is_the_nearest_multiple_of_its_groups_scale(seed, exponent):
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal((6, 64)).astype(np.float32) * np.float32(2.0**exponent)
    kernel, scale = quantized(weights, 16)
    assert (kernel.dtype, scale.dtype, scale.shape) == (jnp.int4, jnp.bfloat16, (6, 4))
    groups = weights.reshape(6, 4, 16)
    largest = np.take_along_axis(groups, np.abs(groups).argmax(axis=2)[:, :, None], axis=2)[:, :, 0]
    np.testing.assert_array_equal(np.asarray(scale), (largest / np.float32(-8)).astype(ml_dtypes.bfloat16))
    wide = np.asarray(scale).astype(np.float32)[:, :, None]
    np.testing.assert_array_equal(
        np.asarray(kernel).astype(np.int32), np.clip(np.rint(groups / wide), -8, 7).reshape(6, 64)
    )
    values = np.asarray(dequantize_groups(kernel, scale)).reshape(groups.shape)
    # Half a step; a whole one where the largest magnitude has the other sign, too.
    assert (np.abs(values - groups) <= np.abs(wide) * 1.04).all()
    inner = np.abs(groups) <= 7 * np.abs(wide)
    assert (np.abs(values - groups)[inner] <= (np.abs(wide) * 0.5001 * np.ones_like(groups))[inner]).all()


def test_a_group_of_zeros_stays_zero_and_one_that_is_not_finite_shows():
    weights = np.ones((3, 32), np.float32)
    weights[0, :16] = 0
    weights[1, 3], weights[2, 20] = np.nan, -np.inf
    values = np.asarray(dequantize_groups(*quantized(weights, 16)))
    np.testing.assert_array_equal(values[0], weights[0])
    assert not np.isfinite(values[1, :16]).any() and not np.isfinite(values[2, 16:]).any()
    np.testing.assert_array_equal(values[1, 16:], 1)


def test_forms_have_one_name_each():
    others = {ScaleFormat.Q4_K, ScaleFormat.NVFP4}
    exact = [FourBit(group=64, numbers=numbers) for numbers in ScaleFormat if numbers not in others]
    exact += [FourBit(group=16, numbers=ScaleFormat.NVFP4)]
    zeros, k = FourBit(group=128, has_zeros=True), FourBit(group=16, numbers=ScaleFormat.Q4_K)
    others = (("layers.0.mlp.down", EightBit.INT8), ("layers.1.attention.qkv", zeros), ("layers.1.mlp.down", zeros))
    for form in (*EightBit, FourBit(group=64), zeros, *exact, k, MixedForms(most=k, others=others)):
        assert form_named(str(form), (256, 384)) == form
    parts = (("head", SixBit()), ("layers.0.attention.qkv.v_proj", SixBit()), ("layers.1.mlp.down", EightBit.INT8))
    for form in (SixBit(), MixedForms(most=k, others=parts), MixedForms(most=SixBit(), others=(("head", zeros),))):
        assert form_named(str(form), (256, 512)) == form
    assert form_named("int4", (4096, 14336)) == FourBit(group=128)
    assert form_named("int4", (256, 640, 352)) == FourBit(group=32)
    assert [largest_group(widths) for widths in ((64, 160), (48, 160), (40,))] == [32, 16, None]
    malformed = ("int5", "int4-", "int4-g64-zero", "int4-g64+", "int4-g64+int8", "int4-g64+int8:", "int4-g64+:head")
    wrong = [(name, (256, 384)) for name in malformed]
    wrong += [("int4", (40,)), ("int4-g128", (256, 64)), ("int4-g8", (64,)), ("int3", (64,))]
    wrong += [("int6-g16-q6_k", (256, 384)), ("int4-g64+int6-g16-q6_k:layers.0.mlp.down", (256, 384))]
    wrong += [("int4-g32-q4_k", (256, 640)), ("int4-g32-q4_k-zeros", (256,)), ("int8+int4-g64:head", (256,))]
    for name, widths in wrong:
        with pytest.raises(ValueError, match=r"int\d|is no form|names no proj"):
            form_named(name, widths)


def test_a_mixed_form_says_what_each_projection_has():
    k, int8 = FourBit(group=32, numbers=ScaleFormat.Q4_K), EightBit.INT8
    others = (("head", SixBit()), ("layers.0.attention.qkv.v_proj", SixBit()), ("layers.1.mlp.down", int8))
    form = MixedForms(most=k, others=others)
    paths = ("layers.0.attention.qkv.q_proj", "layers.0.attention.qkv.v_proj", "layers.1.mlp.down", "layers.0.mlp.down")
    assert [form.at(path) for path in paths] == [k, SixBit(), int8, k]
    assert form.is_split("layers.0.attention.qkv") and not form.is_split("layers.1.attention.qkv")
    assert described(form) == (
        "projections are int4, groups of 32 as in Q4_K (1 in int6, groups of 16 as in Q6_K; 1 in int8), "
        "and the head is int6, groups of 16 as in Q6_K"
    )
    assert described(SixBit()) == "projections and head are int6, groups of 16 as in Q6_K"
    only_head = MixedForms(most=FourBit(group=32), others=(("head", SixBit()),))
    assert described(only_head) == "projections are int4, groups of 32, and the head is int6, groups of 16 as in Q6_K"
    assert (only_head.whole, form.whole, MixedForms(most=k, others=others[2:]).in_head) == (32, 256, int8)
