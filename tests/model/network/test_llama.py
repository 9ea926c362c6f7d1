"""The forward pass against transformers' (tests/model/goldens), and the invariants that need no golden."""

from __future__ import annotations

from dataclasses import fields, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model.config import Llama3Scaling, LlamaConfig
from model.loading.weights import load_hf
from model.network.cpu_products import MAX_ROWS_FROM_LEFT
from model.network.llama import Llama
from model.network.packed import use_cpu_products
from tests.model import checkpoints, driver
from tests.model.dense_attention import causal_attention, dense_hidden, dense_logits
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


PERTURBED = {
    "rms_norm_eps": 1e-2,
    "rope_theta": 500.0,
    "rope_scaling": Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
    ),
    "num_heads": 2,
    "num_kv_heads": 4,
    "head_dim": 16,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_layers": 2,
    "vocab_size": 128,
    "tie_word_embeddings": True,
}
# What the forward pass rightly does not read.
NOT_COMPUTED = {
    "max_position_embeddings",
    "checkpoint_dtype",
    "quantized",
    "kv_scale_type",
    "bos_token_id",
    "eos_token_ids",
}


def test_every_config_field_is_perturbed_or_known_not_to_matter():
    assert {field.name for field in fields(LlamaConfig)} == PERTURBED.keys() | NOT_COMPUTED


@pytest.mark.parametrize("field", PERTURBED)
def test_perturbing_a_config_field_moves_the_logits(field):
    base = replace(TINY, num_layers=1)
    before, after = (
        np.asarray(dense_logits(tiny(config), np.arange(24)))
        for config in (base, replace(base, **{field: PERTURBED[field]}))
    )
    assert before.shape != after.shape or np.abs(before - after).max() > 1e-2


@pytest.mark.parametrize(
    ("variant", "num_tokens"), [("gqa2", 1), ("gqa2", MAX_ROWS_FROM_LEFT), ("tied", 8), ("bf16", 8)]
)
def test_the_cpus_forms_of_the_products_compute_the_same(variant, num_tokens, tmp_path):
    folder = checkpoints.write(tmp_path, variant)
    config = LlamaConfig.from_file(folder)
    usual, for_cpu = (load_hf(folder, config, dtype=jnp.float32) for _ in range(2))
    use_cpu_products(for_cpu)
    sequence = checkpoints.golden_sequence(variant)
    wanted = dense_logits(usual, sequence)[:num_tokens]  # the program that the goldens are compared with
    np.testing.assert_allclose(dense_logits(for_cpu, sequence[:num_tokens]), wanted, atol=2e-5)


def test_a_token_sees_no_later_one_and_every_earlier_one():
    model, tokens = tiny(), np.arange(16)
    before = np.asarray(dense_logits(model, tokens))
    changed = tokens.copy()
    changed[7] = 50
    moved = np.abs(np.asarray(dense_logits(model, changed)) - before).max(-1) > 1e-4
    assert moved.tolist() == [False] * 7 + [True] * 9


def test_only_relative_positions_matter():
    model, tokens = tiny(), np.arange(16)
    nothing = [None] * 2
    forward = nnx.jit(lambda model, positions: model(tokens, positions, nothing, causal_attention())[0])
    near, far = forward(model, np.arange(16)), forward(model, np.arange(16) + 100)
    np.testing.assert_allclose(near, far, atol=1e-4)


def test_attend_gets_each_layers_kv_and_what_it_returns_comes_back():
    model = tiny()
    seen = []

    def attend(queries, keys, values, kv):
        seen.append((queries.shape, keys.shape, values.shape, kv))
        return jnp.zeros_like(queries), kv + 10

    returned = []
    jax.eval_shape(lambda x: returned.extend(model(x, x, [0, 1], attend)[1]), jnp.arange(5))
    assert seen == [((5, 4, 8), (5, 2, 8), (5, 2, 8), 0), ((5, 4, 8), (5, 2, 8), (5, 2, 8), 1)]
    assert returned == [10, 11]


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


def test_a_wrong_number_of_kv_is_refused():
    with pytest.raises(ValueError, match=r"len\(kv\)=1"):
        tiny()(jnp.arange(5), jnp.arange(5), [None], causal_attention())


def test_several_sequences_in_a_row_do_not_see_each_other():
    model = tiny()
    first, second = np.arange(8), np.arange(8) + 40
    positions, nothing = np.tile(np.arange(8), 2), [None] * 2
    forward = nnx.jit(lambda model, tokens: model(tokens, positions, nothing, causal_attention(2))[0])
    together = forward(model, np.concatenate([first, second]))
    apart = [dense_hidden(model, x) for x in (first, second)]
    np.testing.assert_allclose(together, np.concatenate(apart), atol=1e-5)


@pytest.mark.parametrize("tie", [False, True])
def test_gradients_reach_every_parameter(tie):
    model = tiny(replace(TINY, tie_word_embeddings=tie))
    tokens = jnp.arange(16)

    def loss(model: Llama) -> jax.Array:
        return -jnp.mean(jnp.diag(jax.nn.log_softmax(dense_logits(model, tokens))[:, 1:]))

    gradients = nnx.to_flat_state(nnx.jit(nnx.grad(loss))(model))
    assert len(list(gradients)) == len(jax.tree.leaves(nnx.state(model)))
    assert all(np.abs(np.asarray(g.get_value())).max() > 0 for _, g in gradients)


def test_split_state_is_flat_arrays_and_merges_into_the_same_model():
    model = tiny()
    graphdef, state = nnx.split(model)
    leaves, structure = jax.tree.flatten(state)
    assert len(leaves) == 2 * 6 + 3
    again = nnx.merge(graphdef, jax.tree.unflatten(structure, leaves))
    tokens = np.arange(16)
    np.testing.assert_array_equal(dense_logits(model, tokens), dense_logits(again, tokens))


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
