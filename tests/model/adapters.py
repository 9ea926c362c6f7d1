"""Folders of LoRA adapters and golden values for tests, of the adapters in tests/model/goldens/make_adapters.py."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from model.config import LlamaConfig
from model.families import LLAMA
from model.loading.hf_format import ADAPTER_CONFIG, ADAPTER_FILE, expected_shapes
from model.network.lora import TARGETS, LoraWeights
from tests.model import checkpoints
from tests.model.goldens import make
from tests.model.goldens.make_adapters import ADAPTERS, ARRAYS, BASE, FOLDERS, PROMPT_LENGTH

__all__ = [
    "ADAPTERS",
    "BASE",
    "base_config",
    "folder",
    "golden",
    "merged",
    "prompt",
    "random_for",
    "random_weights",
    "read",
    "write",
]

PREFIX = "base_model.model."
ALL = tuple(name for names in TARGETS.values() for name in names)


@cache
def _arrays() -> dict[str, np.ndarray]:
    with np.load(ARRAYS) as file:
        return dict(file)


def base_config() -> LlamaConfig:
    """Of the model that the golden adapters are for: `checkpoints.write(folder, BASE)`."""
    return LlamaConfig.from_hf(make.config(BASE))


def folder(name: str) -> Path:
    """The folder of a golden adapter, as peft has written it."""
    return FOLDERS / name


def prompt() -> np.ndarray:
    """i64[12]: the tokens that the goldens begin with."""
    return make.prompt(make.config(BASE), int(checkpoints.goldens()[f"{BASE}.seed"]))[:PROMPT_LENGTH]


def golden(name: str) -> tuple[np.ndarray, list[int]]:
    """f32[12, vocab]: peft's logits of the prompt with this adapter, and the eight greedy tokens that follow."""
    return _arrays()[f"{name}.logits"], _arrays()[f"{name}.tokens"].tolist()


def merged(tensors: Mapping[str, np.ndarray], weights: LoraWeights) -> dict[str, np.ndarray]:
    """A checkpoint's tensors with the adapter added."""
    out = dict(tensors)
    for layer, pairs in enumerate(weights.layers):
        for name, (a, b) in pairs.items():
            part = "self_attn" if name[0] in "qkvo" else "mlp"
            key = f"model.layers.{layer}.{part}.{name}.weight"
            out[key] = out[key] + b @ a
    return out


def read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Config and tensors of a folder with safetensors."""
    return json.loads((path / ADAPTER_CONFIG).read_text()), load_file(path / ADAPTER_FILE)


def write(path: Path, raw: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> Path:
    """A folder in PEFT's form."""
    path.mkdir(parents=True, exist_ok=True)
    (path / ADAPTER_CONFIG).write_text(json.dumps(raw))
    save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, path / ADAPTER_FILE)
    return path


def random_weights(
    config: LlamaConfig,
    identity: int,
    *,
    rank: int = 4,
    targets: Iterable[str] = ALL,
    layers: Iterable[int] | None = None,
) -> LoraWeights:
    """An adapter that changes what the model says, in memory. The identity is also the seed."""
    rng, shapes, of_layers = np.random.default_rng(identity), expected_shapes(config), []
    for layer in range(config.num_layers):
        pairs = {}
        for name in targets if layers is None or layer in layers else ():
            part = "self_attn" if name[0] in "qkvo" else "mlp"
            num_out, num_in = shapes[f"model.layers.{layer}.{part}.{name}.weight"]
            a, b = rng.normal(size=(rank, num_in)), rng.normal(size=(num_out, rank))
            pairs[name] = (0.1 * a.astype(np.float32), 0.1 * b.astype(np.float32))
        of_layers.append(pairs)
    return LoraWeights(identity=identity, layers=of_layers)


def random_for(
    path: Path,
    config: LlamaConfig,
    *,
    rank: int = 4,
    seed: int = 0,
    targets: Iterable[str] = ("q_proj", "v_proj"),
    size: float = 1.0,
    dtype: Any = np.float32,
) -> Path:
    """A folder with an adapter of random weights. At size 1, what it adds is about as large as what it is added to."""
    rng, shapes, targets = np.random.default_rng(seed), expected_shapes(config), list(targets)
    tensors = {}
    for module in LLAMA.projections(config.num_layers):
        if module.rpartition(".")[2] in targets:
            outputs, inputs = shapes[f"{module}.weight"]
            for part, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                values = rng.normal(size=shape, scale=size**0.5 * shape[1] ** -0.5)
                tensors[f"{PREFIX}{module}.lora_{part}.weight"] = values.astype(ml_dtypes.bfloat16).astype(dtype)
    raw = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets, "bias": "none"}
    return write(path, raw, tensors)
