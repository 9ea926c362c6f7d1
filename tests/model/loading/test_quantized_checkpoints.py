"""Checkpoints that are quantised already, written here from the formats' descriptions, against their own values."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from model.config import LlamaConfig, projections
from model.loading.stored_weights import find_weights
from model.loading.weights import load_hf
from model.network.sharding import make_mesh
from model.quantization.eight_bit import quantize
from model.quantization.forms import EightBit
from tests.model import checkpoints
from tests.model.loading.test_weights import flat
from tests.model.quantization.test_checkpoint_form import compressed

FP8, INT8 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(np.int8)
BLOCK = (40, 24)  # divides neither the rows nor the columns of every projection

quantized = jax.jit(quantize, static_argnums=1)


def scales_of(weights: np.ndarray, strategy: str, largest: float) -> np.ndarray:
    if strategy == "tensor":
        return np.abs(weights).max().reshape(1) / largest
    if strategy == "channel":
        return np.abs(weights).max(axis=1, keepdims=True) / largest
    rows, columns = (range(0, n, b) for n, b in zip(weights.shape, BLOCK, strict=True))
    parts = [[np.abs(weights[i : i + BLOCK[0], j : j + BLOCK[1]]).max() for j in columns] for i in rows]
    return np.array(parts, np.float32) / largest


def to_every_weight(scales: np.ndarray, strategy: str, shape: tuple[int, int]) -> np.ndarray:
    if strategy == "block":
        return np.repeat(np.repeat(scales, BLOCK[0], 0), BLOCK[1], 1)[: shape[0], : shape[1]]
    return np.broadcast_to(scales.reshape(-1, 1), shape)


def write(folder, strategy: str, dtype, *, scale="weight_scale", quantization=None, scale_dtype=np.float32):
    """A checkpoint, its tensors, and the values that these stand for."""
    dtype = np.dtype(dtype)
    checkpoints.write(folder, "gqa2")
    raw = json.loads((folder / "config.json").read_text())
    modules, stored, values = projections(raw["num_hidden_layers"]), {}, {}
    for key, weights in checkpoints.tensors("gqa2").items():
        module, wide = key.removesuffix(".weight"), weights.astype(np.float32)
        stored[key], values[key] = weights, wide
        if module in modules:
            scales = scales_of(wide, strategy, 127 if dtype == INT8 else 448).astype(scale_dtype)
            factors = to_every_weight(scales.astype(np.float32), strategy, wide.shape)
            scaled = np.clip(wide / factors, *((-127, 127) if dtype == INT8 else (-448, 448)))
            kernel = (np.rint(scaled) if dtype == INT8 else scaled).astype(dtype)
            stored |= {key: kernel, f"{module}.{scale}": scales, f"{module}.input_scale": np.ones(1, np.float32)}
            values[key] = kernel.astype(np.float32) * factors
    checkpoints.write_tensors(folder, stored)
    form = {"strategy": strategy, "type": "int" if dtype == INT8 else "float", "block_structure": list(BLOCK)}
    own = compressed("int-quantized" if dtype == INT8 else "float-quantized", **form)
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": quantization or own}))
    return stored, values


def load(folder, form: EightBit | None, num_shards: int = 1):
    mesh = make_mesh(num_shards) if num_shards > 1 else None
    return flat(load_hf(folder, LlamaConfig.from_file(folder), dtype=jnp.float32, mesh=mesh, quantization=form))


def load_wide(folder, values, num_shards: int = 1):
    """The same values from a checkpoint that is not quantised."""
    checkpoints.write(folder, "gqa2")
    checkpoints.write_tensors(folder, values)
    return load(folder, None, num_shards)


@pytest.mark.parametrize("num_shards", [1, 4])  # KV heads are repeated for four
@pytest.mark.parametrize(
    ("strategy", "dtype", "scale_dtype"),
    [("tensor", FP8, np.float32), ("channel", FP8, ml_dtypes.bfloat16), ("channel", INT8, np.float32)],
)
def test_rows_are_taken_as_they_are_stored(tmp_path, strategy, dtype, scale_dtype, num_shards):
    _, values = write(tmp_path / "narrow", strategy, dtype, scale_dtype=scale_dtype)
    form = EightBit.INT8 if dtype == INT8 else EightBit.FP8
    found, wanted = load(tmp_path / "narrow", form, num_shards), load_wide(tmp_path / "wide", values, num_shards)
    kernels = [name for name in wanted if name.startswith("layers.") and name.endswith(".kernel")]
    assert kernels
    for name in kernels:
        kernel, scale = found[name], found[name.replace("kernel", "scale")]
        assert kernel.dtype == dtype
        np.testing.assert_array_equal(kernel.astype(np.float32) * scale[:, None], wanted[name])
    kernel, scale = quantized(wanted["head.kernel"], form)  # which the checkpoint left as it was
    np.testing.assert_array_equal(found["head.kernel"], kernel)
    np.testing.assert_array_equal(found["embedding"], wanted["embedding"])


@pytest.mark.parametrize("num_shards", [1, 4])
@pytest.mark.parametrize(
    ("strategy", "form"), [("channel", EightBit.INT8), ("block", EightBit.FP8), ("block", EightBit.INT8)]
)
def test_others_are_quantised_anew_from_their_values(tmp_path, strategy, form, num_shards):
    """FP8 where the chip wants int8, and blocks, whose scales are not those of rows."""
    _, values = write(tmp_path / "narrow", strategy, FP8)
    found, wanted = load(tmp_path / "narrow", form, num_shards), load_wide(tmp_path / "wide", values, num_shards)
    for name in ("layers.1.mlp.down", "layers.0.attention.qkv", "layers.2.attention.out"):
        kernel, scale = quantized(wanted[f"{name}.kernel"], form)
        np.testing.assert_array_equal(found[f"{name}.kernel"], kernel)
        np.testing.assert_array_equal(found[f"{name}.scale"], scale)


def test_weight_scale_inv_multiplies(tmp_path):
    raw = {"quant_method": "fp8", "weight_block_size": list(BLOCK)}
    _, values = write(tmp_path, "block", FP8, scale="weight_scale_inv", quantization=raw)
    kernel, _ = quantized(values["model.layers.2.mlp.down_proj.weight"], EightBit.FP8)
    np.testing.assert_array_equal(load(tmp_path, EightBit.FP8)["layers.2.mlp.down.kernel"], kernel)


def test_what_is_stored_is_known_before_it_is_loaded(tmp_path):
    write(tmp_path, "channel", INT8)
    stored = find_weights(tmp_path, LlamaConfig.from_file(tmp_path))
    assert stored.quantization is EightBit.INT8
    assert set(stored.dtypes) == {str(value.dtype) for value in checkpoints.tensors("gqa2").values()}


def test_scales_that_are_missing_or_of_another_shape_are_named(tmp_path):
    stored, _ = write(tmp_path, "channel", FP8)
    rows = stored["model.layers.1.mlp.up_proj.weight"].shape[0]
    del stored["model.layers.0.mlp.up_proj.weight_scale"]
    stored["model.layers.1.mlp.up_proj.weight_scale"] = np.ones(3, np.float32)
    stored["model.layers.2.mlp.up_proj.weight"] = stored["model.layers.2.mlp.up_proj.weight"].astype(np.int8)
    checkpoints.write_tensors(tmp_path, stored)
    with pytest.raises(ValueError, match="does not hold") as error:
        find_weights(tmp_path, LlamaConfig.from_file(tmp_path))
    text = str(error.value)
    assert "missing: model.layers.{0}.mlp.up_proj.weight_scale" in text
    assert f"{{1}}.mlp.up_proj.weight_scale has shape (3,), not one of (), (1,), ({rows},), ({rows}, 1)" in text
    assert "model.layers.{2}.mlp.up_proj.weight has type I8, not one of F8_E4M3" in text
