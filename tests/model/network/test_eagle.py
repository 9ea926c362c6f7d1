"""Heads against the code of EAGLE's authors (tests/model/goldens/make_eagle.py), position by position and chained."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from model.eagle_config import EagleConfig, EagleForm
from model.loading.eagle_head import HeadFiles, load_head
from model.network.eagle import EagleHead
from model.network.llama import Llama
from model.network.sharding import make_mesh
from tests.model import eagle_heads
from tests.model.dense_attention import causal_attention
from tests.model.driver import tiny_model
from tests.model.goldens.make_eagle import CHAIN, LENGTH, VARIANTS, hidden_states, is_third, model_head, tokens


def head_of(folder, variant: str, *, mesh=None) -> EagleHead:
    form = EagleForm.EAGLE3 if is_third(variant) else EagleForm.EAGLE
    config = EagleConfig.from_file(eagle_heads.written(folder, variant), form, eagle_heads.MODEL)
    assert HeadFiles(folder, config).has_embedding
    return load_head(folder, config, dtype=jnp.float32, mesh=mesh, has_embedding=True)


@pytest.fixture(scope="module")
def model() -> Llama:
    """Only its head is used."""
    model = tiny_model(config=eagle_heads.model_config(num_layers=1))
    model.head.kernel.set_value(jnp.asarray(model_head()))
    return model


@nnx.jit
def run(
    head: EagleHead, model: Llama, features: jax.Array, read: jax.Array, given: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The head over the whole text, its own features in place of `features` from LENGTH on; given i32[CHAIN] tokens."""
    count = LENGTH + CHAIN - 1
    text = jnp.concatenate([read, given[: CHAIN - 1]])
    features = jnp.pad(features, ((0, CHAIN - 1), (0, 0)))
    positions = jnp.arange(count)
    for _ in range(CHAIN):  # each pass knows one more of its own features
        out, _ = head(model, text, positions, features, None, causal_attention())
        features = features.at[LENGTH:].set(out[LENGTH - 1 : -1])
    return out, head.logits(model, out)


@pytest.mark.parametrize("variant", VARIANTS)
def test_features_logits_and_drafts_are_those_of_the_authors_code(variant, model, tmp_path) -> None:
    head, golden = head_of(tmp_path, variant), eagle_heads.goldens()
    states = jnp.asarray(hidden_states(variant))
    features = head.features(states, jnp.split(states, 3, axis=1) if is_third(variant) else [])
    drafts = golden[f"{variant}.drafts"]
    out, logits = run(head, model, features, jnp.asarray(tokens(variant)[1:], jnp.int32), jnp.asarray(drafts))
    np.testing.assert_allclose(out[:LENGTH], golden[f"{variant}.features"], atol=2e-5)
    np.testing.assert_allclose(logits[:LENGTH], golden[f"{variant}.logits"], atol=2e-5)
    np.testing.assert_allclose(logits[LENGTH - 1 :], golden[f"{variant}.chain"], atol=2e-5)
    found = jnp.argmax(logits[LENGTH - 1 :], axis=-1)
    if head.vocabulary is not None:
        assert jnp.argmax(head.vocabulary.spread(logits[LENGTH - 1 :]), axis=-1).tolist() == drafts.tolist()
        found = head.vocabulary.to_model[found]
    assert found.tolist() == drafts.tolist()


@pytest.mark.parametrize("variant", ["eagle", "eagle3"])
def test_a_head_on_two_chips_computes_the_same(variant, model, tmp_path) -> None:
    mesh = make_mesh(2)
    alone, split = (head_of(tmp_path, variant, mesh=mesh) for mesh in (None, mesh))
    whole = nnx.clone(model)
    nnx.update(whole, jax.device_put(nnx.state(model), NamedSharding(mesh, PartitionSpec())))
    states = jnp.asarray(hidden_states(variant))
    read, drafts = jnp.asarray(tokens(variant)[1:], jnp.int32), jnp.asarray(eagle_heads.goldens()[f"{variant}.drafts"])
    results = []
    for head, own in ((alone, model), (split, whole)):
        features = head.features(states, jnp.split(states, 3, axis=1) if is_third(variant) else [])
        results.append(run(head, own, features, read, drafts)[0])
    np.testing.assert_allclose(results[0], results[1], atol=2e-5)


def test_taps_are_the_inputs_of_layers() -> None:
    model, text = tiny_model(), jnp.arange(5)
    hidden, _, (first, middle, last) = model.run(text, text, [None] * 2, causal_attention(), (0, 1, 2))
    embedded, cos, sin = model.embed(text, text)
    np.testing.assert_array_equal(first, embedded)
    expected, _ = model.layers[0](embedded, cos, sin, None, causal_attention())
    np.testing.assert_allclose(middle, expected, atol=1e-6)
    np.testing.assert_allclose(model.norm(last), hidden, atol=1e-6)
