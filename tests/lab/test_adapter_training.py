"""The training of a LoRA adapter, for a few steps on a tiny model: the loss, and the folder that is written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from model.loading.adapter import read_adapter
from model.loading.source import DEMO_FOLDER
from model.loading.weights import load_hf
from model.network.llama import Llama
from scripts.lab.demo.adapters import TEXTS
from scripts.lab.demo.export import save_hf
from scripts.lab.demo.tokenizer import SampleEncoder
from scripts.lab.demo.trainer import Schedule, Shape, rounded, row_logits
from scripts.lab.train_adapter import AdapterTrainer, save_peft
from tests.model import checkpoints
from tests.model.adapters import merged
from tests.model.driver import TINY

SCHEDULE = Schedule(
    steps=12,
    learning_rate=0.05,
    warmup=2,
    seed=3,
    shapes=(Shape(row_length=96, num_rows=2, share=1.0, kind="short"),),
)


@pytest.fixture(scope="module")
def encoder() -> SampleEncoder:
    return SampleEncoder(Tokenizer.from_file(str(DEMO_FOLDER / "tokenizer.json")), prompt_weight=0.1)


def test_the_folder_has_the_adapter_that_lowered_the_loss(encoder: SampleEncoder, tmp_path: Path) -> None:
    config = replace(TINY, vocab_size=encoder.tokenizer.get_vocab_size(), max_position_embeddings=128)
    base = Llama(config, dtype=jnp.float32, rngs=nnx.Rngs(0))
    trainer = AdapterTrainer(base, SCHEDULE, rank=4)
    lines: list[str] = []
    trainer.run(TEXTS["pirate"], encoder, report_every=1, report=lambda _, line: lines.append(line))
    losses = [float(line.split()[3]) for line in lines]
    assert len(losses) == SCHEDULE.steps
    assert losses[-1] < losses[0] - 0.1

    save_peft(tmp_path / "adapter", trainer.params, rank=4)
    read = read_adapter(tmp_path / "adapter", config, max_rank=4)
    assert all(len(layer) == 7 for layer in read.layers)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (1, 12)).astype(np.int32)
    place = (tokens, np.arange(12, dtype=np.int32)[None], np.ones_like(tokens))
    logits = jax.jit(row_logits)
    trained = logits(trainer.model(rounded(trainer.params), base), *place)
    save_hf(base, tmp_path, dtype=jnp.float32)
    checkpoints.write_tensors(tmp_path, merged(load_file(tmp_path / "model.safetensors"), read))
    with_weights = load_hf(tmp_path, config, dtype=jnp.float32)
    np.testing.assert_allclose(logits(with_weights, *place), trained, atol=2e-4)
    assert np.abs(logits(base, *place) - trained).max() > 0.1
