"""GRPO: its formulas by hand, a step against a gradient in NumPy, and a run of a few steps with a real engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from model.config import LlamaConfig
from model.loading.weights import load_hf
from model.network.llama import Llama
from scripts.lab import grpo
from scripts.lab.rollouts import Rollouts, dense_logprobs, rollouts
from scripts.llm import LLM, SamplingParams
from scripts.offline.results import CompletionOutput, Logprob, RequestOutput
from tests.demo.one_layer import one_layer
from tests.model.dense_attention import dense_logits
from tests.model.driver import TINY


def output(ids: tuple[int, ...], text: str = "", reason: str = "stop", logprob: float = -0.5) -> CompletionOutput:
    return CompletionOutput(
        index=0,
        text=text,
        token_ids=ids,
        finish_reason=reason,
        stop_reason=None,
        logprobs=[{id: Logprob(logprob)} for id in ids],
        sampled_logprobs=None,
        tool_calls=[],
        weight_versions=[("default", len(ids))],
    )


def result(prompt: tuple[int, ...], *outputs: CompletionOutput) -> RequestOutput:
    return RequestOutput(
        request_id="", prompt=None, prompt_token_ids=prompt, prompt_logprobs=None, outputs=outputs, num_cached_tokens=0
    )


TWO_PROMPTS = [result((1, 2, 3), output((4, 5)), output((6,))), result((7,), output((8, 9, 10, 11)))]


def test_dense_log_probabilities_are_those_of_each_answer_alone() -> None:
    model = Llama(TINY, dtype=jnp.float32, rngs=nnx.Rngs(0))
    batch = rollouts(TWO_PROMPTS)
    found = jax.jit(dense_logprobs)(model, batch.tokens, batch.targets, batch.positions, batch.samples)
    expected = []
    for asked in TWO_PROMPTS:
        for answer in asked.outputs:
            ids = np.array([*asked.prompt_token_ids, *answer.token_ids])
            logits = np.asarray(dense_logits(model, ids[:-1]), np.float64)
            logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
            expected += list(logprobs[np.arange(len(ids) - 1), ids[1:]][len(asked.prompt_token_ids) - 1 :])
    np.testing.assert_allclose(found[batch.drawn], expected, atol=1e-5)


def test_advantages_are_standard_deviations_of_the_group() -> None:
    found = grpo.advantages(np.array([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]))
    np.testing.assert_allclose(found, [[3**0.5, *[-(3**-0.5)] * 3], [0.0] * 4], atol=1e-5)


def test_the_divergence_is_the_papers_and_its_mean_that_of_the_distributions() -> None:
    policy, reference = np.array([0.7, 0.2, 0.1]), np.array([0.5, 0.3, 0.2])
    per_token = grpo.divergence(jnp.log(policy), jnp.log(reference))
    np.testing.assert_allclose(per_token, reference / policy - np.log(reference / policy) - 1, atol=1e-6)
    np.testing.assert_allclose(per_token @ policy, np.sum(policy * np.log(policy / reference)), atol=1e-6)


BOUNDS = {"clip": 0.2, "kl_weight": 0.0}


@pytest.mark.parametrize(
    ("advantage", "ratio", "slope"),
    [(2.0, 1.0, 2.0), (2.0, 1.1, 2.2), (2.0, 1.3, 0.0), (2.0, 0.5, 1.0), (-2.0, 0.7, 0.0), (-2.0, 1.3, -2.6)],
)
def test_a_ratio_out_of_bounds_gains_nothing_more(advantage: float, ratio: float, slope: float) -> None:
    old, one = jnp.full((1, 1), -1.0), jnp.ones((1, 1))
    gain = jax.grad(lambda policy: grpo.objective(policy, old, old, one, one * advantage, **BOUNDS))
    np.testing.assert_allclose(gain(old + jnp.log(ratio)), [[slope]], atol=1e-5)


def test_a_step_prefers_the_good_answers_and_leaves_the_reference() -> None:
    model = Llama(TINY, dtype=jnp.float32, rngs=nnx.Rngs(0))
    given = rollouts(
        [result((1, 2, 3), output((4, 5)), output((6, 7))), result((8, 9), output((10,)), output((11, 12)))]
    )

    def scores(model: Llama) -> np.ndarray:
        found = jax.jit(dense_logprobs)(model, given.tokens, given.targets, given.positions, given.samples)
        return np.where(given.drawn, found, 0)

    def of_answers(values: np.ndarray) -> list[list[float]]:
        return [
            [float(row[numbers == number].sum()) for number in (1, 2)]
            for row, numbers in zip(values, given.samples, strict=True)
        ]

    before = scores(model)
    batch = replace(given, logprobs=before)
    trainer = grpo.Trainer(model, optax.sgd(0.02), clip=0.2, kl_weight=0.1)
    advantage = np.array([[1.0, -1.0], [-1.0, 1.0]], np.float32)
    kl, off = trainer.step(batch, advantage)
    assert (kl, off) == pytest.approx((0.0, 0.0), abs=1e-5)
    changes = scores(trainer.model) - before
    (good, bad), (worse, better) = of_answers(changes)
    assert good - bad > 1e-3 and better - worse > 1e-3
    kl, off = trainer.step(batch, advantage)
    policy, reference = before + changes, before
    per_token = (np.expm1(reference - policy) - (reference - policy))[given.drawn]
    assert kl == pytest.approx(per_token.mean(), rel=1e-3)
    assert off == pytest.approx(np.abs(changes).max(), rel=1e-3)


@pytest.mark.slow
def test_the_checkpoint_is_the_policy_that_the_engine_has_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start, out = one_layer(tmp_path / "start"), tmp_path / "out"
    flags = ["--model", str(start), "--output", str(out), "--steps", "3", "--num-questions", "2", "--group-size", "4"]
    assert grpo.main([*flags, "--learning-rate", "0.01", "--plot", str(out / "curve.png")]) == 0
    told = json.loads((out / "grpo.json").read_text())
    assert [step["step"] for step in told["steps"]] == [1, 2, 3]
    assert all(step["off"] < 1e-3 for step in told["steps"])  # the engine drew with the weights of the step before
    assert (out / "curve.png").stat().st_size > 1000
    assert "scripts/serve --model" in capsys.readouterr().out
    with LLM(str(out), device="cpu", max_num_seqs=1, max_num_batched_tokens=16) as llm:  # few programs
        (answer,) = llm.chat(
            [{"role": "user", "content": "Which is the largest of 3, 57 and 31?"}], SamplingParams(logprobs=0, seed=1)
        )
    config = LlamaConfig.from_file(out)
    assert config.checkpoint_dtype == "float32"
    batch: Rollouts = rollouts([answer])
    trained = load_hf(out, config, dtype=jnp.float32)
    found = dense_logprobs(trained, batch.tokens, batch.targets, batch.positions, batch.samples)
    np.testing.assert_allclose(batch.logprobs[batch.drawn], found[batch.drawn], atol=1e-4)
    first = load_hf(start, LlamaConfig.from_file(start), dtype=jnp.float32)
    assert any(
        np.abs(a - b).max() > 1e-3 for a, b in zip(*map(jax.tree.leaves, map(nnx.state, (first, trained))), strict=True)
    )
