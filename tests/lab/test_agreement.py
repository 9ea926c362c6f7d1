"""The instrument "agreement": its float64 forward, and its table from real engines of one layer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model.network.llama import Llama
from scripts.lab import agreement
from scripts.lab.rollouts import Rollouts, dense_logprobs
from tests.demo.one_layer import one_layer
from tests.model.driver import TINY


@pytest.mark.parametrize("tied", [False, True])
def test_the_forward_in_float64_is_the_models(tied: bool) -> None:
    model = Llama(replace(TINY, tie_word_embeddings=tied), dtype=jnp.float32, rngs=nnx.Rngs(0))
    ids = np.random.default_rng(0).integers(0, TINY.vocab_size, (2, 21)).astype(np.int32)
    ones = np.ones((2, 20), np.int32)
    batch = Rollouts(
        tokens=ids[:, :-1],
        targets=ids[:, 1:],
        positions=np.cumsum(ones, axis=1) - 1,
        samples=ones,
        weights=ones / np.float32(20),
        logprobs=np.zeros((2, 20), np.float32),
    )
    exact = agreement.exact_logprobs(model, batch)
    assert exact.dtype == np.float64
    dense = jax.jit(dense_logprobs)(model, batch.tokens, batch.targets, batch.positions, batch.samples)
    np.testing.assert_allclose(dense, exact, atol=2e-5)


@pytest.mark.slow
def test_each_form_has_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(one_layer(tmp_path / "model"))
    forms = ["int8-kv", "drafts"]
    flags = ["--model", model, "--samples", "2", "--max-tokens", "24", "--forms", *forms]
    assert agreement.main(flags) == 0
    lines = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("|")][2:]
    rows = {name.strip(): [float(cell) for cell in cells] for name, *cells in lines}
    assert list(rows) == forms
    num_tokens, _, worst, mean, kl, engine, trainer = rows["drafts"]
    assert num_tokens > 0
    assert mean <= worst < 1e-4 and engine < 1e-4 and trainer < 1e-4 and kl < 1e-8
    assert 1e-4 < rows["int8-kv"][2] < 1
