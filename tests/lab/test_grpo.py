"""GRPO: its formulas by hand, a step against a gradient in NumPy, and a run of a few steps with a real engine."""

from __future__ import annotations

import json
import random
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
from scripts.lab.grpo import Question
from scripts.lab.rollouts import WIDTH, Rollouts, dense_logprobs, rollouts
from scripts.llm import LLM, SamplingParams
from scripts.offline.results import CompletionOutput, RequestOutput
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
        logprobs={"content": [{"logprob": logprob} for _ in ids]},
        tool_calls=(),
        weight_versions=(("default", len(ids)),),
    )


def result(prompt: tuple[int, ...], *outputs: CompletionOutput) -> RequestOutput:
    return RequestOutput(
        request_id="", prompt=None, prompt_token_ids=prompt, prompt_logprobs=None, outputs=outputs, num_cached_tokens=0
    )


def test_rows_have_the_answers_behind_their_prompts() -> None:
    batch = rollouts([result((1, 2, 3), output((4, 5)), output((6,))), result((7,), output((8, 9)))])
    assert batch.tokens.shape == (3, WIDTH)
    assert batch.tokens[:, :5].tolist() == [[1, 2, 3, 4, 0], [1, 2, 3, 0, 0], [7, 8, 0, 0, 0]]
    assert batch.targets[:, :5].tolist() == [[2, 3, 4, 5, 0], [2, 3, 6, 0, 0], [8, 9, 0, 0, 0]]
    assert batch.drawn[:, :5].tolist() == [[0, 0, 1, 1, 0], [0, 0, 1, 0, 0], [1, 1, 0, 0, 0]]
    assert batch.samples[:, :5].tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 0, 0], [1, 1, 0, 0, 0]]
    np.testing.assert_array_equal(batch.logprobs, -0.5 * batch.drawn)
    assert batch.num_drawn == 5


def test_dense_log_probabilities_are_those_of_each_row_alone() -> None:
    model = Llama(TINY, dtype=jnp.float32, rngs=nnx.Rngs(0))
    batch = rollouts([result((1, 2, 3), output((4, 5))), result((7,), output((8, 9, 10, 11)))])
    found = jax.jit(dense_logprobs)(model, batch.tokens, batch.targets, batch.samples)
    for row, length in enumerate((4, 4)):
        logits = np.asarray(dense_logits(model, batch.tokens[row, :length]), np.float64)
        expected = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        np.testing.assert_allclose(
            found[row, :length], expected[np.arange(length), batch.targets[row, :length]], atol=1e-5
        )


def test_advantages_are_standard_deviations_of_the_group() -> None:
    found = grpo.advantages(np.array([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]))
    np.testing.assert_allclose(found, [[3**0.5, *[-(3**-0.5)] * 3], [0.0] * 4], atol=1e-5)


def test_the_divergence_is_the_papers_and_its_mean_that_of_the_distributions() -> None:
    policy, reference = np.array([0.7, 0.2, 0.1]), np.array([0.5, 0.3, 0.2])
    per_token = grpo.divergence(jnp.log(policy), jnp.log(reference))
    np.testing.assert_allclose(per_token, reference / policy - np.log(reference / policy) - 1, atol=1e-6)
    np.testing.assert_allclose(per_token @ policy, np.sum(policy * np.log(policy / reference)), atol=1e-6)


ROW = {"clip": 0.2, "kl_weight": 0.0}


@pytest.mark.parametrize(
    ("advantage", "ratio", "slope"),
    [(2.0, 1.0, 2.0), (2.0, 1.1, 2.2), (2.0, 1.3, 0.0), (2.0, 0.5, 1.0), (-2.0, 0.7, 0.0), (-2.0, 1.3, -2.6)],
)
def test_a_ratio_out_of_bounds_gains_nothing_more(advantage: float, ratio: float, slope: float) -> None:
    old, drawn = jnp.full((1, 1), -1.0), jnp.ones((1, 1))

    def gain(policy: jax.Array) -> jax.Array:
        return grpo.objective(policy, old, old, drawn, jnp.array([advantage]), **ROW)[0]

    np.testing.assert_allclose(jax.grad(gain)(old + jnp.log(ratio)), [[slope]], atol=1e-5)


def test_every_answer_counts_the_same_and_padding_nothing() -> None:
    drawn = jnp.array([[0.0, 1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0, 0.0]])
    policy, reference = -1.0 * drawn, -1.5 * drawn
    given = (policy, reference, drawn, jnp.array([1.0, -1.0]))
    slopes = jax.grad(lambda p: grpo.objective(p, *given, **ROW)[0])(policy)
    np.testing.assert_allclose(slopes, drawn * np.array([[1 / 8], [-1 / 4]]), atol=1e-6)
    value, kl = grpo.objective(policy, *given, clip=0.2, kl_weight=0.5)
    a_token = np.exp(-0.5) + 0.5 - 1
    np.testing.assert_allclose([value, kl], [-0.5 * a_token, a_token], atol=1e-6)


def test_a_step_prefers_the_good_answer_and_leaves_the_reference() -> None:
    model = Llama(TINY, dtype=jnp.float32, rngs=nnx.Rngs(0))
    given = rollouts([result((1, 2, 3), output((4, 5)), output((6, 7)))])

    def scores(model: Llama) -> np.ndarray:
        found = jax.jit(dense_logprobs)(model, given.tokens, given.targets, given.samples)
        return np.asarray(found) * given.drawn

    before = scores(model)
    batch = replace(given, logprobs=before)
    trainer = grpo.Trainer(model, optax.sgd(0.02), clip=0.2, kl_weight=0.1)
    advantage = np.array([1.0, -1.0], np.float32)
    kl, off = trainer.step(batch, advantage)
    assert (kl, off) == pytest.approx((0.0, 0.0), abs=1e-5)
    changes = (scores(trainer.model) - before).sum(axis=1)
    assert changes[0] - changes[1] > 1e-3
    kl, off = trainer.step(batch, advantage)
    assert kl > 1e-7
    assert off == pytest.approx(np.abs(scores(trainer.model) - before).max(), rel=2)


def test_questions_are_new_and_answers_are_judged_by_their_last_number() -> None:
    asked = grpo.question(random.Random(0))
    assert str(eval(asked.text.removeprefix("What is ").removesuffix("?"))) == asked.answer
    endless = grpo.new_questions(random.Random(0), {asked})
    assert asked not in [next(endless) for _ in range(5)]
    judged = [
        grpo.reward(Question("What is 1 + 2 + 3?", "6"), answer)
        for answer in (output((1,), "1 + 2 + 3 = 6."), output((1,), "6 = 1 + 2 + 3."), output((1,), "six"))
    ]
    assert judged == [1.0, 0.0, 0.0]
    assert grpo.reward(Question("", "6"), output((1,), "= 6", reason="length")) == 0.0


@pytest.mark.slow
def test_the_checkpoint_is_the_policy_that_the_engine_has_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start, out = one_layer(tmp_path / "start"), tmp_path / "out"
    flags = ["--model", str(start), "--output", str(out), "--steps", "3", "--num-questions", "2", "--group-size", "4"]
    # Rewards of a model that knows nothing are all 0; the divergence moves with the learning rate alone.
    assert grpo.main([*flags, "--learning-rate", "0.01", "--plot", str(out / "curve.png")]) == 0
    told = json.loads((out / "grpo.json").read_text())
    assert [step["step"] for step in told["steps"]] == [1, 2, 3]
    assert all(step["off"] < 1e-3 for step in told["steps"])  # the engine drew with the weights of the step before
    assert (out / "curve.png").stat().st_size > 1000
    assert "scripts/serve --model" in capsys.readouterr().out
    with LLM(str(out), device="cpu") as llm:
        (answer,) = llm.chat([{"role": "user", "content": "What is 1 + 2 + 3?"}], SamplingParams(logprobs=0, seed=1))
    config = LlamaConfig.from_file(out)
    assert config.checkpoint_dtype == "float32"
    batch: Rollouts = rollouts([answer])
    trained = load_hf(out, config, dtype=jnp.float32)
    found = dense_logprobs(trained, batch.tokens, batch.targets, batch.samples) * batch.drawn
    np.testing.assert_allclose(batch.logprobs, found, atol=1e-4)
    first = load_hf(start, LlamaConfig.from_file(start), dtype=jnp.float32)
    assert any(
        np.abs(a - b).max() > 1e-3 for a, b in zip(*map(jax.tree.leaves, map(nnx.state, (first, trained))), strict=True)
    )


def test_counts_that_are_none_are_all_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert grpo.main(["--output", str(tmp_path), "--steps", "0", "--group-size", "1"]) == 2
    error = capsys.readouterr().err
    assert "--steps 0 is not 1 or more" in error and "--group-size 1 is not 2 or more" in error
