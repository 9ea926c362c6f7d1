"""The training loop on a model of a few thousand parameters: packing, the optimizer, resuming, the exported files."""

import random
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model.config import LlamaConfig
from model.loading.weights import load_hf
from scripts.lab import train_demo
from scripts.lab.demo import stories
from scripts.lab.demo import tokenizer as demo_tokenizer
from scripts.lab.demo.arithmetic import Arithmetic
from scripts.lab.demo.corpus import Corpus
from scripts.lab.demo.tokenizer import SampleEncoder
from scripts.lab.demo.trainer import Schedule, Shape, Trainer, rounded
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
