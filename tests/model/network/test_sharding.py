"""The model over several chips: eight CPU devices stand in (tests/conftest.py)."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from batcher.request import Pooling
from batcher.step import Bucket, Variant
from model.config import LlamaConfig
from model.execution.memory_plan import RunnerConfig
from model.execution.runner import ModelRunner
from model.execution.step import SCORE_BLOCK
from model.loading.weights import load_hf
from model.network.llama import Llama
from model.network.sharding import abstract_model, make_mesh, sharding_of, stored_config
from model.quantization.forms import FourBit, MixedForms
from tests.model import checkpoints
from tests.model.collectives import collectives
from tests.model.dense_attention import causal_attention, dense_logits
from tests.model.driver import paged_attention
from tests.model.goldens.make import PROMPT_LENGTH
from tests.model.network.test_llama import TINY


def test_a_mesh_wants_chips_that_are_there():
    assert dict(make_mesh(4).shape) == {"tensor": 4}
    with pytest.raises(ValueError, match="num_shards=9 chips are asked for, 8 are there"):
        make_mesh(9)


@pytest.mark.parametrize(
    ("kv_heads", "num_shards", "stored"), [(8, 1, 8), (8, 8, 8), (8, 4, 8), (2, 8, 8), (1, 2, 2), (4, 2, 4)]
)
def test_kv_heads_are_repeated_until_each_chip_has_one(kv_heads, num_shards, stored):
    config = replace(TINY, num_heads=16, num_kv_heads=kv_heads)
    assert stored_config(config, num_shards) == replace(config, num_kv_heads=stored)


def test_everything_that_does_not_divide_is_named():
    config = replace(TINY, num_heads=6, num_kv_heads=3, intermediate_size=50, vocab_size=97)
    with pytest.raises(ValueError, match=r"num_heads=6, num_kv_heads=3, intermediate_size=50, vocab_size=97"):
        stored_config(config, 4)


@pytest.mark.parametrize(
    ("variant", "num_shards"),
    [("mha", 2), ("mha", 4), ("gqa2", 2), ("gqa2", 4), ("mqa", 4), ("tied", 4), ("llama3_rope_tied_bf16", 2)],
)
def test_logits_over_chips_equal_the_goldens(variant, num_shards, tmp_path):
    """mha has a KV head per chip, gqa2 and mqa fewer: theirs are repeated."""
    folder = checkpoints.write(tmp_path, variant)
    mesh = make_mesh(num_shards)
    model = load_hf(folder, LlamaConfig.from_file(folder), dtype=jnp.float32, mesh=mesh)
    logits = dense_logits(model, checkpoints.golden_sequence(variant))
    golden = checkpoints.goldens()[f"{variant}.logits"]
    assert np.abs(np.asarray(logits)[:PROMPT_LENGTH] - golden).max() < 2e-4


@pytest.mark.parametrize("num_shards", [1, 2])
def test_fused_projections_in_parts_compute_what_whole_ones_do(num_shards, tmp_path):
    """The only KV head is repeated for two chips."""
    folder = checkpoints.write(tmp_path, "mqa")
    options = {"dtype": jnp.float32, "mesh": make_mesh(num_shards) if num_shards > 1 else None}
    form, names = FourBit(group=16), ("layers.0.attention.qkv.v_proj", "layers.1.mlp.gate_up.gate_proj")
    forms = form, MixedForms(most=form, others=tuple((name, form) for name in names))
    whole, parts = (load_hf(folder, LlamaConfig.from_file(folder), quantization=form, **options) for form in forms)
    tokens = checkpoints.golden_sequence("mqa")
    expected, found = (np.asarray(dense_logits(model, tokens)) for model in (whole, parts))
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


def test_the_chips_exchange_two_sums_a_layer_and_one_embedding():
    mesh = make_mesh(4)
    model = abstract_model(replace(TINY, num_kv_heads=4), dtype=jnp.float32, mesh=mesh)
    graphdef, state = nnx.split(model)

    def forward(state, tokens):
        model: Llama = nnx.merge(graphdef, state)
        hidden, _ = model(tokens, tokens, [None] * 2, causal_attention())
        return model.logits(hidden)

    tokens = jax.ShapeDtypeStruct((16,), jnp.int32, sharding=sharding_of((), mesh))
    compiled = jax.jit(forward).lower(state, tokens).compile()
    kinds = [collective.kind for collective in collectives(compiled.as_text())]
    assert kinds == ["all-reduce"] * (2 * TINY.num_layers + 1)
    assert compiled.output_shardings.is_equivalent_to(sharding_of(("embed", "vocab"), mesh), 2)


def step_collectives(bucket, num_shards, vocab):
    """Of the step's program over `num_shards` chips, for a small model with a large vocabulary."""
    config = replace(TINY, vocab_size=vocab, num_heads=8, num_kv_heads=8, intermediate_size=64)
    mesh = make_mesh(num_shards)
    sizes = {"max_num_seqs": bucket.num_rows, "max_num_batched_tokens": 32, "max_model_len": 64, "num_pages": 16}
    limits = RunnerConfig(**sizes, pooling=Pooling.MEAN if bucket.variant is Variant.EMBED else None)
    model = abstract_model(config, dtype=jnp.float32, mesh=mesh)
    runner = ModelRunner(model, paged_attention(model.config, mesh=mesh), limits)
    return collectives(runner.described.step(bucket).lower().compile().as_text())


@pytest.mark.parametrize(
    ("bucket", "num_shards"), [(Bucket(4, 4, Variant.SAMPLE), 8), (Bucket(96, 8, Variant.EMBED), 2)]
)
def test_logits_stay_where_they_are_made(bucket, num_shards):
    """128256 tokens are 1002 blocks of the draw, which two chips share evenly, and eight do not. Either step draws."""
    found = step_collectives(bucket, num_shards, vocab=128256)
    in_loop = [collective.size for collective in found if collective.in_loop]
    assert in_loop == ([SCORE_BLOCK] if bucket.num_tokens > SCORE_BLOCK else [])  # the targets' logits, for their ranks
    assert {collective.kind for collective in found} == {"all-reduce", "all-gather"}
    rows = bucket.num_tokens if bucket.variant.scores else bucket.num_rows
    too_large = rows * 32 * num_shards
    small = [
        x for x in found if x.shape != (bucket.num_tokens, TINY.hidden_size)
    ]  # the layers' sums, and the embedding's
    assert len(found) - len(small) == 2 * TINY.num_layers + 1
    assert not [collective for collective in small if collective.size > too_large]


def test_greedy_tokens_take_three_small_sums():
    """The greatest logit, its first token, and whether all are finite."""
    found = step_collectives(Bucket(4, 4, Variant.GREEDY), num_shards=8, vocab=1536)
    assert [collective.kind for collective in found] == ["all-reduce"] * (2 * TINY.num_layers + 1 + 3)
    assert sorted(x.size for x in found)[:3] == [4, 4, 4]
    assert not [collective for collective in found if collective.in_loop]
