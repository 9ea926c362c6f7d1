"""Folders of EAGLE heads for tests, of the variants in tests/model/goldens/make_eagle.py."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from model.config import LlamaConfig
from model.eagle_config import EagleConfig, EagleForm
from model.loading.eagle_head import expected_shapes
from tests.model import driver
from tests.model.goldens import make_eagle

MODEL = replace(driver.TINY, vocab_size=make_eagle.VOCAB, hidden_size=make_eagle.MODEL_WIDTH, num_layers=6)


@cache
def goldens() -> dict[str, np.ndarray]:
    with np.load(make_eagle.FOLDER / "eagle.npz") as file:
        return dict(file)


def stored(variant: str) -> dict[str, np.ndarray]:
    """The tensors in the types of their files."""
    return {k: v.astype(np.float16) if v.dtype == np.float32 else v for k, v in make_eagle.tensors(variant).items()}


def write(folder: Path, raw: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def written(folder: Path, variant: str) -> Path:
    return write(folder, make_eagle.config(variant), stored(variant))


def model_config(**changes: Any) -> LlamaConfig:
    return replace(MODEL, **changes)


def random_for(folder: Path, form: EagleForm, model: Path, **changes: Any) -> Path:
    """A head of random weights for the model in a folder, with half of its tokens for EAGLE-3."""
    raw = json.loads((model / "config.json").read_text())
    raw |= {"num_hidden_layers": 1, "tie_word_embeddings": False}
    if form is EagleForm.EAGLE3:
        raw |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": raw["vocab_size"] // 2}
    raw |= changes
    config, rng = EagleConfig.from_hf(raw, form, LlamaConfig.from_file(model)), np.random.default_rng(0)
    tensors: dict[str, np.ndarray] = {}
    for name, shape in expected_shapes(config).items():
        if name in ("d2t", "t2d", "embed_tokens.weight"):
            continue
        stored = name.replace("layer.", "midlayer." if form is EagleForm.EAGLE3 else "layers.0.", 1)
        value = np.ones(shape) if len(shape) == 1 else rng.normal(size=shape) * shape[-1] ** -0.5
        tensors[stored if name.startswith("layer.") else name] = value.astype(np.float16)
    if form is EagleForm.EAGLE3:
        drafted = np.sort(rng.permutation(raw["vocab_size"])[: config.draft_vocab_size])
        tensors["d2t"] = (drafted - np.arange(len(drafted))).astype(np.int64)
        tensors["t2d"] = np.isin(np.arange(raw["vocab_size"]), drafted)
    return write(folder, raw, tensors)
