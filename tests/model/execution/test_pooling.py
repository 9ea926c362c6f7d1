"""Embeddings on the device: pooled hidden states are those of a dense pass, and of transformers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from batcher.request import Pooling
from batcher.step import Bucket, Variant
from model.config import LlamaConfig
from model.execution.memory_plan import RunnerConfig
from model.execution.runner import ModelRunner
from model.execution.step import pool
from model.loading.weights import load_hf
from tests.model import checkpoints
from tests.model.dense_attention import dense_hidden, dense_logits
from tests.model.driver import Row, paged_attention, run, tiny_model, tiny_runner
from tests.model.goldens.make import PROMPT_LENGTH

EMBED = Bucket(40, 4, Variant.EMBED)
BOTH = pytest.mark.parametrize("pooling", Pooling)


def pooled(hidden: np.ndarray, pooling: Pooling) -> np.ndarray:
    return hidden[-1] if pooling is Pooling.LAST else hidden.sum(axis=0)


@BOTH
def test_what_is_not_finite_stays_in_its_row(pooling):
    hidden = jnp.array([[1.0, 2], [3, jnp.inf], [5, 6], [jnp.nan, 8]])
    found = np.asarray(pool(hidden, jnp.array([0, 1, 2, 3, 4]), pooling))
    assert np.isfinite(found).all(axis=1).tolist() == [True, False, True, False]
    np.testing.assert_array_equal(found[[0, 2]], hidden[jnp.array([0, 2])])


@pytest.fixture(scope="module", params=Pooling)
def runner(request):
    made = tiny_runner(max_num_batched_tokens=40, pooling=request.param)
    made.warm_up([EMBED], lambda line: None)
    return made


def embed(runner: ModelRunner, row: Row, counts: list[int], company: Row | None = None) -> np.ndarray:
    """What the row's chunks give together, next to another row in the first step."""
    parts = []
    for i, count in enumerate(counts):
        others = [(company, len(company.prompt))] if company is not None and i == 0 else []
        rows = [(row, count), *others]
        output = run(runner, EMBED, rows, admit=[row for row, _ in rows] if i == 0 else [])
        at = [r is row for r, _ in sorted(rows, key=lambda chunk: chunk[1] != 1)].index(True)
        parts.append(output.pooled[at].copy())
    return parts[-1] if runner.capacity().pooling is Pooling.LAST else np.sum(parts, axis=0)


@pytest.mark.parametrize("counts", [[30], [29, 1], [1, 29], [7, 11, 12]])
def test_chunks_give_what_a_dense_pass_gives(runner, counts):
    prompt = [int(token) for token in np.random.default_rng(3).integers(0, 199, 30)]
    expected = pooled(np.asarray(dense_hidden(tiny_model(), np.array(prompt))), runner.capacity().pooling)
    alone = embed(runner, Row(1, prompt, [5, 3, 8, 2]), counts)
    np.testing.assert_allclose(alone, expected, rtol=1e-4, atol=1e-4)
    in_company = embed(runner, Row(1, prompt, [5, 3, 8, 2]), counts, Row(3, [7] * 9, [9, 10]))
    np.testing.assert_allclose(in_company, expected, rtol=1e-4, atol=1e-4)


def test_a_prompt_may_fill_the_context(runner):
    prompt = [int(token) for token in np.random.default_rng(4).integers(0, 199, runner.capacity().max_model_len)]
    expected = pooled(np.asarray(dense_hidden(tiny_model(), np.array(prompt))), runner.capacity().pooling)
    pages = list(range(10, 10 + runner.capacity().pages_per_seq))
    found = embed(runner, Row(2, prompt, pages), [40, 23, 1])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("variant", "pooling"), [("gqa2", Pooling.LAST), ("llama3_rope", Pooling.MEAN)])
def test_hidden_states_are_those_of_transformers(variant, pooling, tmp_path):
    """The goldens have logits of a head with more outputs than inputs: its inputs follow from them."""
    folder = checkpoints.write(tmp_path, variant)
    config = LlamaConfig.from_file(folder)
    head = checkpoints.tensors(variant)["lm_head.weight"].astype(np.float64)
    golden = np.linalg.lstsq(head, checkpoints.goldens()[f"{variant}.logits"].astype(np.float64).T)[0].T
    prompt = checkpoints.golden_sequence(variant)[:PROMPT_LENGTH].tolist()
    model = load_hf(folder, config, dtype=jnp.float32)
    limits = RunnerConfig(max_num_seqs=4, max_num_batched_tokens=40, max_model_len=64, num_pages=16, pooling=pooling)
    runner = ModelRunner(model, paged_attention(config), limits)
    runner.warm_up([EMBED], lambda line: None)
    found = embed(runner, Row(0, prompt, [4, 1, 2, 3]), [20, 12])
    np.testing.assert_allclose(found, pooled(golden, pooling), rtol=1e-3, atol=1e-3)


def test_programs_of_requests_that_do_not_embed_are_the_same():
    plain, embeds = tiny_runner(), tiny_runner(pooling=Pooling.MEAN)
    for bucket in (Bucket(4, 4, Variant.GREEDY), Bucket(32, 4, Variant.SCORE)):
        assert plain.described.step(bucket).lower().as_text() == embeds.described.step(bucket).lower().as_text()


def test_scored_prompts_share_steps_with_embeddings(runner):
    scored, embedded = Row(0, [3, 1, 4, 1, 5], [1]), Row(2, [9, 2, 6], [2])
    output = run(runner, EMBED, [(scored, 5), (embedded, 3)], admit=[scored, embedded])
    exact = np.asarray(jax.nn.log_softmax(dense_logits(tiny_model(), np.array(scored.prompt)), axis=-1))
    np.testing.assert_allclose(output.target_logprobs[:4], exact[np.arange(4), scored.prompt[1:]], atol=1e-4)
