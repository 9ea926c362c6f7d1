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
