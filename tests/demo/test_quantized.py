"""What 8 bits a weight, or 8 bits of K/V, cost the demo: the divergence from float32 tells, its sums hardly notice."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from tokenizers import Tokenizer

from model.config import LlamaConfig
from model.loading.source import DEMO_FOLDER
from model.loading.weights import load_hf
from model.quantization.forms import EightBit
from scripts.demo import evaluate
from scripts.demo.agreement import agreement
from scripts.demo.narrow_kv import with_narrow_kv
from scripts.demo.tokenizer import SampleEncoder


@pytest.mark.parametrize(("form", "divergence", "same"), [(EightBit.INT8, 1e-4, 0.98), (EightBit.FP8, 1e-3, 0.95)])
def test_it_stays_near_the_exact_model(form, divergence, same):
    config = LlamaConfig.from_file(DEMO_FOLDER)
    encoder = SampleEncoder(Tokenizer.from_file(str(DEMO_FOLDER / "tokenizer.json")), prompt_weight=0.0)
    exact, model = (load_hf(DEMO_FOLDER, config, dtype=jnp.float32, quantization=q) for q in (None, form))
    assert agreement(exact, exact, encoder).divergence == 0
    near = agreement(exact, model, encoder)
    assert 0 < near.divergence < divergence
    assert same < near.same_top_token < 1
    sums = evaluate.suites()["held_out_sums"]
    assert sum(evaluate.exact(model, encoder, sums)) >= 0.95 * len(sums)


def test_it_stays_near_the_exact_model_with_keys_and_values_of_int8():
    config = LlamaConfig.from_file(DEMO_FOLDER)
    encoder = SampleEncoder(Tokenizer.from_file(str(DEMO_FOLDER / "tokenizer.json")), prompt_weight=0.0)
    exact = load_hf(DEMO_FOLDER, config, dtype=jnp.float32)
    model = with_narrow_kv(exact)
    near = agreement(exact, model, encoder)
    assert 0 < near.divergence < 1e-3
    assert 0.98 < near.same_top_token < 1
    sums = evaluate.suites()["held_out_sums"]
    assert sum(evaluate.exact(model, encoder, sums)) >= 0.95 * len(sums)
