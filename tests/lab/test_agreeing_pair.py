"""The made-up model and draft model: what each says next, and how often they agree."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from model.config import LlamaConfig
from model.loading.source import DEMO_FOLDER
from scripts.building.weights import choose_weights
from scripts.flags.settings import EngineSettings
from scripts.lab.agreeing_pair import write_pair

VOCAB_SIZE = 1000


def config() -> LlamaConfig:
    demo = LlamaConfig.from_file(DEMO_FOLDER)
    return replace(demo, vocab_size=VOCAB_SIZE, checkpoint_dtype="float32", bos_token_id=None, eos_token_ids=())


def greedy(folder: Path) -> np.ndarray:
    """The token that follows each token if no layer adds anything, and a check that none does."""
    tensors = load_file(folder / "model.safetensors")
    last = [name for name in tensors if name.endswith(("o_proj.weight", "down_proj.weight"))]
    assert len(last) == 2 * LlamaConfig.from_file(folder).num_layers
    assert not any(tensors[name].any() for name in last)
    assert all(tensors[name].std() > 0 for name in tensors if name.endswith(("q_proj.weight", "up_proj.weight")))
    return (tensors["model.embed_tokens.weight"] @ tensors["lm_head.weight"].T).argmax(axis=1)


@pytest.mark.parametrize("agreement", [0.0, 0.7, 1.0])
def test_the_draft_model_agrees_as_often_as_asked(tmp_path, agreement):
    pair = write_pair(tmp_path, config(), agreement)
    successors, drafted = greedy(pair.model), greedy(pair.draft)
    assert (successors == drafted).mean() == agreement
    token, seen = 0, set()
    while token not in seen:
        seen.add(token)
        token = int(successors[token])
    assert len(seen) == VOCAB_SIZE  # no text repeats itself
    assert [int(successors[token]) for token in pair.walk[:-1]] == list(pair.walk[1:])
    for folder in (pair.model, pair.draft):
        assert choose_weights(EngineSettings(model=str(folder), device="cpu"), "cpu").config.vocab_size == VOCAB_SIZE
