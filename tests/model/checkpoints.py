"""Checkpoint folders and golden values for the tests of this room, of the variants in tests/model/goldens/make.py."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from tests.model.goldens import make as make_goldens


@cache
def goldens() -> dict[str, np.ndarray]:
    with np.load(make_goldens.FOLDER / "llama.npz") as file:
        return dict(file)


@cache
def configs_as_written() -> dict[str, dict]:
    """variant -> config.json in the spelling of transformers 5."""
    return json.loads((make_goldens.FOLDER / "configs.json").read_text())


def tensors(variant: str) -> dict[str, np.ndarray]:
    """The variant's weights in the type of its file."""
    raw = make_goldens.config(variant)
    dtype = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}[raw["torch_dtype"]]
    values = make_goldens.tensors(raw, int(goldens()[f"{variant}.seed"]))
    return {name: value.astype(dtype) for name, value in values.items()}


def write(folder: Path, variant: str, *, num_files: int = 1) -> Path:
    """A Hugging Face checkpoint folder; with several files there is an index, as there always is."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(make_goldens.config(variant)))
    write_tensors(folder, tensors(variant), num_files=num_files)
    return folder


def write_tensors(folder: Path, values: dict[str, np.ndarray], *, num_files: int = 1) -> None:
    if num_files == 1:
        save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for i in range(num_files):
        name = f"model-{i + 1:05}-of-{num_files:05}.safetensors"
        part = dict(list(values.items())[i::num_files])
        save_file(part, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def golden_sequence(variant: str) -> np.ndarray:
    """i32[96]: the prompt and its greedy continuation."""
    raw = make_goldens.config(variant)
    seed = int(goldens()[f"{variant}.seed"])
    return np.concatenate([make_goldens.prompt(raw, seed), goldens()[f"{variant}.tokens"]]).astype(np.int32)
