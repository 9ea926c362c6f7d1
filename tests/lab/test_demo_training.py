"""The training loop on a model of a few thousand parameters: packing, the optimizer, resuming, the exported files."""

import random
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tokenizers import Tokenizer

from model.config import LlamaConfig
from model.loading.source import DEMO_FOLDER
from model.loading.weights import load_hf
from scripts.lab import train_demo
from scripts.lab.demo import stories
from scripts.lab.demo import tokenizer as demo_tokenizer
from scripts.lab.demo.arithmetic import Arithmetic
from scripts.lab.demo.corpus import Corpus
from scripts.lab.demo.tokenizer import SampleEncoder
from scripts.lab.demo.trainer import Schedule, Shape, Trainer, rounded, row_logits
from tests.model.driver import TINY

CORPUS = Corpus(Arithmetic(), sum_share=0.4, story_share=0.3)
SCHEDULE = Schedule(
    steps=6,
    learning_rate=0.01,
    warmup=2,
    seed=3,
    shapes=(Shape(row_length=96, num_rows=2, share=1.0, kind="short"),),
)


@pytest.fixture(scope="module")
def encoder() -> SampleEncoder:
    rng = random.Random(0)
    tokenizer = demo_tokenizer.train([stories.story(rng).text for _ in range(200)], 512)
    return SampleEncoder(tokenizer, prompt_weight=0.1)


@pytest.fixture(scope="module")
def config(encoder: SampleEncoder) -> LlamaConfig:
    return replace(
        TINY,
        vocab_size=encoder.tokenizer.get_vocab_size(),
        max_position_embeddings=128,
        tie_word_embeddings=True,
        checkpoint_dtype="bfloat16",
        bos_token_id=496,
        eos_token_ids=(497, 505),
    )


def test_a_sample_does_not_see_its_neighbours(config: LlamaConfig, encoder: SampleEncoder) -> None:
    trainer = Trainer(config, SCHEDULE)
    model = trainer.model(trainer.params)
    rng = np.random.default_rng(0)
    first, second = rng.integers(0, 400, 5), rng.integers(0, 400, 7)
    logits = jax.jit(row_logits)
    packed = logits(
        model,
        jnp.asarray(np.concatenate([first, second]))[None],
        jnp.asarray([*range(5), *range(7)])[None],
        jnp.asarray([1] * 5 + [2] * 7)[None],
    )
    alone = logits(model, jnp.asarray(second)[None], jnp.arange(7)[None], jnp.ones((1, 7), jnp.int32))
    np.testing.assert_allclose(packed[0, 5:], alone[0], atol=1e-5)


def test_training_lowers_the_loss_and_goes_on_where_it_was(
    config: LlamaConfig, encoder: SampleEncoder, tmp_path: Path
) -> None:
    lines: list[str] = []
    whole = Trainer(config, SCHEDULE)
    whole.run(CORPUS, encoder, report_every=1, report=lambda _, line: lines.append(line))
    losses = [float(line.split()[3]) for line in lines]
    assert len(losses) == SCHEDULE.steps
    assert losses[-1] < losses[0] - 0.05

    first = Trainer(config, SCHEDULE)
    first.run(CORPUS, encoder, report_every=10, report=lambda *_: None, stop_after=3)
    first.save(tmp_path / "state.npz")
    second = Trainer(config, SCHEDULE)
    second.restore(tmp_path / "state.npz")
    assert second.step == 3
    second.run(CORPUS, encoder, report_every=10, report=lambda *_: None)
    for name, param in whole.params.items():
        np.testing.assert_allclose(second.params[name], param, atol=1e-6, err_msg=name)


def test_the_exported_checkpoint_is_the_model(config: LlamaConfig, encoder: SampleEncoder, tmp_path: Path) -> None:
    trainer = Trainer(config, SCHEDULE)
    train_demo.export(tmp_path, trainer.model(trainer.params), encoder.tokenizer)
    assert LlamaConfig.from_file(tmp_path) == config
    loaded = load_hf(tmp_path, config, dtype=jnp.float32)
    expected = nnx.state(trainer.model(rounded(trainer.params)))
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(loaded)), nnx.to_pure_dict(expected))


def test_a_checkpoint_can_be_gone_on_with(tmp_path: Path) -> None:
    """`--from model/demo`: its tokenizer and weights, before the first step of a schedule of its own."""
    flags = ["--from", str(DEMO_FOLDER), "--output", str(tmp_path), "--work-dir", str(tmp_path), "--steps", "70"]
    trainer, _, encoder = train_demo.prepare(train_demo.parse_arguments(flags))
    assert (trainer.step, trainer.schedule.steps) == (0, 70)
    assert trainer.config == LlamaConfig.from_file(DEMO_FOLDER)
    assert encoder.tokenizer.get_vocab() == Tokenizer.from_file(str(DEMO_FOLDER / "tokenizer.json")).get_vocab()
    train_demo.export(tmp_path, trainer.model(trainer.params), encoder.tokenizer)
    for name in ("model.safetensors", "config.json", "generation_config.json", "tokenizer.json"):
        assert (tmp_path / name).read_bytes() == (DEMO_FOLDER / name).read_bytes(), name
    assert train_demo.evaluation_of(DEMO_FOLDER)["parameters"] == sum(p.size for p in trainer.params.values())


def test_a_model_that_is_its_own_teacher_has_nothing_to_learn(config: LlamaConfig, encoder: SampleEncoder) -> None:
    alone = Trainer(config, SCHEDULE)
    taught = Trainer(config, SCHEDULE, teacher=alone.model(alone.params))
    batch = vars(SCHEDULE.batch(0, CORPUS, encoder))

    @jax.jit
    def gradients(params: dict, teacher: object) -> tuple[dict, dict]:
        of_text = jax.grad(alone._loss)(params, batch, None)
        return of_text, jax.grad(taught._loss)(params, batch, teacher)

    of_text, of_teacher = gradients(taught.params, taught.teacher)
    norms = [float(jnp.sqrt(sum(jnp.vdot(g, g) for g in found.values()))) for found in (of_text, of_teacher)]
    assert norms[1] < 1e-4 * norms[0]
