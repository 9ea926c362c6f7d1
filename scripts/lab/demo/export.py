"""Writes a model in the Hugging Face form, which `model.loading.weights.load_hf` and other engines read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from model.config import LlamaConfig
from model.loading.hf_format import SINGLE_FILE, expected_shapes, sources
from model.network.llama import Llama


def save_hf(model: Llama, folder: Path, *, dtype: Any = jnp.bfloat16) -> None:
    """Writes `config.json` and one `model.safetensors` of `dtype`. The model must be stored for one chip.

    Raises:
        ValueError: the model is quantised, or stored for several chips: projections are then cut and KV heads may be
            repeated.
    """
    if model.num_shards != 1:
        raise ValueError(f"only a model stored for one chip can be exported: {model.num_shards=}")
    if model.quantization is not None:
        raise ValueError(f"quantised weights are not exported: {model.quantization=}")
    dtype = jnp.dtype(dtype)
    items = nnx.to_flat_state(nnx.state(model))
    params = {".".join(map(str, path)): variable.get_value() for path, variable in items}
    folder.mkdir(parents=True, exist_ok=True)
    weights = folder / SINGLE_FILE
    save_file(hf_tensors(model.config, params, dtype=dtype), weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # safetensors makes the file private; other users may read a checkpoint
    config = replace(model.config, checkpoint_dtype=dtype.name)
    (folder / "config.json").write_text(json.dumps(config.to_hf(), indent=2) + "\n")


def hf_tensors(config: LlamaConfig, params: Mapping[str, jax.Array], *, dtype: Any) -> dict[str, np.ndarray]:
    """Checkpoint key -> tensor [out, in], the fused parameters ("layers.0.attention.qkv.kernel") split."""
    shapes = expected_shapes(config)
    tensors: dict[str, np.ndarray] = {}
    for name, param in params.items():
        rows = np.asarray(param.astype(dtype))
        parts = sources(name, config.family)
        ends = np.cumsum([shapes[part.key][0] for part in parts])
        for part, piece in zip(parts, np.split(rows, ends[:-1]), strict=True):
            tensors[part.key] = np.ascontiguousarray(piece)
    assert {key: tensor.shape for key, tensor in tensors.items()} == shapes, "a parameter has no place or a wrong one"
    return tensors
