"""The forward pass against transformers' (tests/model/goldens), and the invariants that need no golden."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model.config import LlamaConfig
from model.loading.weights import load_hf
from model.network.llama import Llama
from tests.model import checkpoints, driver
from tests.model.dense_attention import causal_attention, dense_logits
from tests.model.goldens.make import NEW_TOKENS, PROMPT_LENGTH, VARIANTS

TINY = replace(driver.TINY, vocab_size=96, head_dim=8, max_position_embeddings=128)


def tiny(config: LlamaConfig = TINY) -> Llama:
    """Weights of a size at which every constant of the model matters, from numpy: nothing is compiled."""
    rng = np.random.default_rng(0)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Llama(config, dtype=jnp.float32, rngs=None)))

    def draw(x: jax.ShapeDtypeStruct) -> jax.Array:
        values = rng.normal(scale=0.2, size=x.shape) if x.ndim == 2 else np.ones(x.shape)
        return jnp.asarray(values.astype(x.dtype))

    return nnx.merge(graphdef, jax.tree.map(draw, state))


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_greedy_text_equal_transformers(variant, tmp_path):
    folder = checkpoints.write(tmp_path, variant)
    model = load_hf(folder, LlamaConfig.from_file(folder), dtype=jnp.float32)
    sequence = checkpoints.golden_sequence(variant)

    logits = np.asarray(dense_logits(model, sequence))

    golden = checkpoints.goldens()[f"{variant}.logits"]
    assert np.abs(logits[:PROMPT_LENGTH] - golden).max() < 2e-4
    # Each choice after the same prefix is the golden one: by induction, so is the text.
    greedy = logits[PROMPT_LENGTH - 1 : -1].argmax(-1)
    assert len(greedy) == NEW_TOKENS
    assert greedy.tolist() == sequence[PROMPT_LENGTH:].tolist()


def test_logits_of_a_tied_config_with_another_head_in_its_files_equal_transformers(tmp_path):
    folder = checkpoints.write(tmp_path, "gqa2")  # has a head of its own, whatever the config says of it
    config = replace(LlamaConfig.from_file(folder), tie_word_embeddings=True)
    logits = np.asarray(dense_logits(load_hf(folder, config, dtype=jnp.float32), checkpoints.golden_sequence("gqa2")))
    assert np.abs(logits[:PROMPT_LENGTH] - checkpoints.goldens()["gqa2.logits"]).max() < 2e-4


@pytest.mark.parametrize("variant", ["bf16", "llama3_rope_tied_bf16"])
def test_bfloat16_stays_near_float32(variant, tmp_path):
    folder = checkpoints.write(tmp_path, variant)
    model = load_hf(folder, LlamaConfig.from_file(folder), dtype=jnp.bfloat16)
    logits = np.asarray(dense_logits(model, checkpoints.golden_sequence(variant)))
    golden = checkpoints.goldens()[f"{variant}.logits"]
    assert logits.dtype == np.float32
    assert np.abs(logits[:PROMPT_LENGTH] - golden).max() < 0.15  # logits of standard deviation 1, up to 4
    assert np.corrcoef(logits[:PROMPT_LENGTH].ravel(), golden.ravel())[0, 1] > 0.999


def test_the_last_layer_computes_the_hidden_states_that_are_wanted_only():
    model, tokens, only = tiny(), np.arange(1, 9), jnp.array([2, 7, 8])
    kv, attend = [None] * TINY.num_layers, causal_attention()

    def run(only: jax.Array | None) -> jax.Array:
        return model.run(tokens, jnp.arange(8), kv, attend, only=only)[0]

    every, wanted = np.asarray(run(None)), np.asarray(run(only))
    np.testing.assert_allclose(wanted, np.stack([every[2], every[7], np.zeros_like(every[0])]), atol=1e-5)
    weights = [leaf.shape for leaf in jax.tree.leaves(nnx.state(model.layers[0])) if leaf.ndim == 2]
    products = [
        equation.invars[0].aval.shape[0]
        for equation in jax.make_jaxpr(run)(only).eqns
        if equation.primitive.name == "dot_general" and equation.invars[1].aval.shape in weights
    ]
    assert products == [8] * (4 * TINY.num_layers - 3) + [3] * 3, "of the last layer, only Q, K and V have all tokens"


@pytest.mark.parametrize("tie", [False, True])
def test_gradients_reach_every_parameter(tie):
    model = tiny(replace(TINY, tie_word_embeddings=tie))
    tokens = jnp.arange(16)

    def loss(model: Llama) -> jax.Array:
        return -jnp.mean(jnp.diag(jax.nn.log_softmax(dense_logits(model, tokens))[:, 1:]))

    gradients = nnx.to_flat_state(nnx.jit(nnx.grad(loss))(model))
    assert len(list(gradients)) == len(jax.tree.leaves(nnx.state(model)))
    assert all(np.abs(np.asarray(g.get_value())).max() > 0 for _, g in gradients)


@pytest.mark.parametrize(("dtype", "exact"), [(jnp.float32, True), (jnp.bfloat16, False)])
def test_float32_products_ask_chips_for_float32(dtype, exact):
    """By default chips multiply float32 in a faster, coarser form; on the CPU of the tests only the request shows."""
    model = nnx.eval_shape(lambda: Llama(TINY, dtype=dtype, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(model)

    def forward(state, tokens):
        model = nnx.merge(graphdef, state)
        hidden, _ = model(tokens, tokens, [None] * 2, lambda queries, keys, values, kv: (queries, kv))
        return model.logits(hidden)

    text = jax.jit(forward).lower(state, jax.ShapeDtypeStruct((8,), jnp.int32)).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert len(products) == 4 * TINY.num_layers + 1
    assert all(("HIGHEST" in line) is exact for line in products)
