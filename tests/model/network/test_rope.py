from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from model.config import LlamaConfig
from model.network.rope import inverse_frequencies, rotate, rotation
from tests.model.checkpoints import goldens
from tests.model.goldens.make import ROTARY, config


@pytest.mark.parametrize("name", ROTARY)
def test_frequencies_equal_transformers(name):
    head_dim, rope = ROTARY[name]
    parsed = LlamaConfig.from_hf(config("gqa2") | rope)
    ours = inverse_frequencies(head_dim, parsed.rope_theta, parsed.rope_scaling)
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, goldens()[f"rotary.{name}"], rtol=3e-7)


def test_a_quarter_turn_by_hand():
    cos, sin = rotation(jnp.array([0, 1]), np.array([np.pi / 2, 0.0], np.float32))
    heads = jnp.array([[[1.0, 2.0, 3.0, 4.0]]] * 2)  # pairs (1, 3) and (2, 4)
    turned = rotate(heads, cos, sin)
    np.testing.assert_allclose(turned, [[[1, 2, 3, 4]], [[-3, 2, 1, 4]]], atol=1e-6)


def test_angles_are_float32_and_the_result_keeps_the_dtype():
    cos, sin = rotation(jnp.array([100_003]), np.array([1.0], np.float32))
    np.testing.assert_allclose(cos[0, 0, 0], np.cos(np.float32(100_003)), atol=1e-6)
    assert rotate(jnp.ones((1, 1, 2), jnp.bfloat16), cos, sin).dtype == jnp.bfloat16
