"""A packed model computes what it computed before, and has the shapes that were planned."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model.loading.weights import random_weights
from model.network.packed import pack
from model.network.sharding import abstract_model
from model.quantization.forms import EightBit
from pallas_kernels.cpu import library
from tests.c_compiler import compiler
from tests.model.dense_attention import dense_logits
from tests.model.driver import TINY


@pytest.fixture(scope="module", autouse=True)
def _native(tmp_path_factory):
    compiler()
    library.load(tmp_path_factory.mktemp("native"))


def shapes(model) -> list:
    return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(nnx.state(model))]


def flat(model) -> dict[str, jax.Array]:
    """Path -> value."""
    return {".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(nnx.state(model))}


def logits(model) -> np.ndarray:
    return np.asarray(dense_logits(model, np.arange(7)), np.float32)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("quantization", [None, EightBit.INT8])
def test_packed_weights_give_the_same_logits(tied, quantization):
    config = replace(TINY, hidden_size=64, intermediate_size=96, vocab_size=320, tie_word_embeddings=tied)
    options = {"dtype": jnp.float32, "quantization": quantization, "for_cpu": True}
    expected = logits(random_weights(config, **options))
    planned, packed = pack(abstract_model(config, **options)), pack(random_weights(config, **options))
    assert shapes(planned) == shapes(packed)
    kernels = {value.ndim for path, value in flat(packed).items() if path.endswith("kernel")}
    assert kernels == {3}
    assert flat(packed)["embedding"].ndim == (3 if tied and quantization is None else 2)
    np.testing.assert_allclose(logits(packed), expected, atol=1e-5 * np.abs(expected).max())


def test_what_has_no_packed_form_stays():
    """Kernels in bfloat16, and those whose outputs are not whole panels."""
    config = replace(TINY, hidden_size=64, intermediate_size=96, vocab_size=100)
    assert {value.ndim for value in flat(pack(random_weights(config, dtype=jnp.bfloat16))).values()} <= {1, 2}
    whole = flat(pack(random_weights(config, dtype=jnp.float32)))
    assert whole["head.kernel"].ndim == 2
    assert whole["layers.0.mlp.down.kernel"].ndim == 3
