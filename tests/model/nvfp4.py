"""Checkpoints in NVFP4, packed here from the formats' descriptions, and the weights that they stand for."""

from __future__ import annotations

import json
import re
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file

from model.config import LlamaConfig
from model.families import LLAMA
from tests.model import checkpoints

MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # by the lower three bits of a number
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]}
_ARGS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
_GROUP = {"targets": ["Linear"], "weights": _ARGS, "input_activations": _ARGS | {"dynamic": "local"}}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "config_groups": {"group_0": _GROUP},
    "ignore": ["lm_head"],
}
CONFIGS = {"ModelOpt NVFP4": MODELOPT, "compressed-tensors NVFP4": COMPRESSED}


def pack(weights: np.ndarray, name: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The tensors of a kernel, and the weights f64[out, in] that they stand for. With the scale of all scales as its
    writer stores it, or with the float32 of its inverse, they are no rounded numbers."""
    groups = weights.astype(np.float32).reshape(weights.shape[0], -1, 16)
    of_all = np.abs(weights).max().astype(np.float32) / np.float32(6 * 448)
    scale = (np.abs(groups).max(axis=2) / 6 / of_all).astype(ml_dtypes.float8_e4m3fn)
    steps = np.abs(groups) / np.maximum(scale.astype(np.float32) * of_all, 1e-30)[:, :, None]
    numbers = np.searchsorted((MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2, steps).astype(np.uint8)
    of_two = (numbers | (groups < 0) * np.uint8(8)).reshape(weights.shape[0], -1, 2)
    packed, shared = of_two[:, :, 0] | of_two[:, :, 1] << 4, {"weight_scale": scale}
    if name == "ModelOpt NVFP4":
        tensors = {"weight": packed, "weight_scale_2": of_all, "input_scale": np.float32(0.01)}
    else:
        inverse = np.float32(1) / of_all
        of_all = np.float32(1) / inverse
        tensors = {"weight_packed": packed, "weight_global_scale": inverse, "input_global_scale": np.float32(100)}
    values = MAGNITUDES[numbers] * np.where(groups < 0, -1, 1) * scale.astype(np.float64)[:, :, None] * of_all.item()
    return shared | {key: np.atleast_1d(value) for key, value in tensors.items()}, values.reshape(weights.shape)


def write(folder: Path, source: Path, name: str, *, left: str = "") -> dict[str, np.ndarray]:
    """A checkpoint of the folder `source` with packed projections, except for those that `left` matches. Returns its
    weights: those of packed kernels in float64, and the others as they are stored."""
    folder.mkdir()
    raw = json.loads((source / "config.json").read_text())
    modules = LLAMA.projections(LlamaConfig.from_file(source).num_layers)
    stored, values = {}, {}
    for key, weights in load_file(source / "model.safetensors").items():
        module = key.removesuffix(".weight")
        if module not in modules or re.fullmatch(left, module):
            stored[key] = values[key] = weights
            continue
        tensors, values[key] = pack(weights, name)
        stored |= {f"{module}.{part}": tensor for part, tensor in tensors.items()}
    checkpoints.write_tensors(folder, stored)
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": CONFIGS[name]}))
    return values


def dequantized(kernel: np.ndarray, scale: np.ndarray, row_scale: np.ndarray) -> np.ndarray:
    """The exact weights f64[out, in] of the parameters."""
    codes = kernel.astype(np.int8).reshape(*scale.shape, 16)
    halves = np.sign(codes) * 2 * MAGNITUDES[np.abs(codes)]
    return (halves * scale.astype(np.float64)[:, :, None]).reshape(kernel.shape) * row_scale.astype(np.float64)
