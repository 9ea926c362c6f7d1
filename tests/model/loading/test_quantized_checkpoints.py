"""Checkpoints that are quantised already, written here from the formats' descriptions, against their own values."""

from __future__ import annotations

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from model.config import LlamaConfig
from model.families import LLAMA
from model.loading.orbax_format import save_orbax
from model.loading.source import CONVERTED, resolve
from model.loading.stored_weights import find_weights
from model.loading.weights import load_hf
from model.network.eight_bit import quantize
from model.network.sharding import make_mesh
from model.quantization.forms import Activations, EightBit, MixedForms, Plain, Rounding, form_named
from scripts.convert_checkpoint import convert
from tests.model import checkpoints
from tests.model.dense_attention import dense_logits
from tests.model.loaded import flat, load, load_wide
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


def write(folder, strategy: str, dtype, *, scale="weight_scale", quantization=None, scale_dtype=np.float32, left=""):
    """A checkpoint, its tensors, and the values that these stand for. `left` matches modules that are not quantised."""
    dtype = np.dtype(dtype)
    checkpoints.write(folder, "gqa2")
    raw = json.loads((folder / "config.json").read_text())
    modules, stored, values = LLAMA.projections(raw["num_hidden_layers"]), {}, {}
    for key, weights in checkpoints.tensors("gqa2").items():
        module, wide = key.removesuffix(".weight"), weights.astype(np.float32)
        stored[key], values[key] = weights, wide
        if module in modules and not re.fullmatch(left, module):
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


@pytest.mark.parametrize("num_shards", [1, 4])  # KV heads are repeated for four
@pytest.mark.parametrize(
    ("strategy", "dtype", "scale_dtype"),
    [("tensor", FP8, np.float32), ("channel", FP8, ml_dtypes.bfloat16), ("channel", INT8, np.float32)],
)
def test_rows_are_taken_as_they_are_stored(tmp_path, strategy, dtype, scale_dtype, num_shards):
    _, values = write(tmp_path / "narrow", strategy, dtype, scale_dtype=scale_dtype)
    form = EightBit.INT8 if dtype == INT8 else EightBit.FP8
    found, wanted = load(tmp_path / "narrow", form, num_shards), load_wide(tmp_path / "wide", values, None, num_shards)
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
    found, wanted = load(tmp_path / "narrow", form, num_shards), load_wide(tmp_path / "wide", values, None, num_shards)
    for name in ("layers.1.mlp.down", "layers.0.attention.qkv", "layers.2.attention.out"):
        kernel, scale = quantized(wanted[f"{name}.kernel"], form)
        np.testing.assert_array_equal(found[f"{name}.kernel"], kernel)
        np.testing.assert_array_equal(found[f"{name}.scale"], scale)


LEFT = ("layers.0.attention.qkv", "layers.0.mlp.down", "layers.1.attention.qkv.v_proj")  # not quantised
LEFT_MODULES = r"model\.layers\.(0\.(self_attn\.[qkv]|mlp\.down)|1\.self_attn\.v)_proj"


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("dtype", [FP8, INT8])
def test_projections_that_are_left_out_keep_their_values(tmp_path, dtype, num_shards):
    _, values = write(tmp_path / "narrow", "channel", dtype, left=LEFT_MODULES)
    form = find_weights(tmp_path / "narrow", LlamaConfig.from_file(tmp_path / "narrow")).quantization
    most = EightBit.INT8 if dtype == INT8 else EightBit.FP8
    assert form == MixedForms(most=most, others=tuple((path, Plain()) for path in LEFT))
    assert form_named(str(form), (64, 160)) == form and form.in_int8 == dataclasses.replace(form, most=EightBit.INT8)
    found, wanted = load(tmp_path / "narrow", form, num_shards), load_wide(tmp_path / "wide", values, None, num_shards)
    wanted["layers.1.attention.qkv.v_proj.kernel"] = values["model.layers.1.self_attn.v_proj.weight"]
    for path in LEFT:
        np.testing.assert_array_equal(found[f"{path}.kernel"], wanted[f"{path}.kernel"])
        assert f"{path}.scale" not in found
    assert found["layers.2.mlp.down.kernel"].dtype == found["layers.1.attention.qkv.k_proj.kernel"].dtype == dtype


def test_logits_with_projections_left_out_are_those_of_the_values_also_after_a_conversion(tmp_path):
    _, values = write(tmp_path / "narrow", "channel", INT8, left=LEFT_MODULES)
    load_wide(tmp_path / "wide", values, None)
    config, wide_config = (LlamaConfig.from_file(tmp_path / name) for name in ("narrow", "wide"))
    form = find_weights(tmp_path / "narrow", config).quantization
    model = load_hf(tmp_path / "narrow", config, dtype=jnp.float32, quantization=form)
    wide = load_hf(tmp_path / "wide", wide_config, dtype=jnp.float32)
    wide.head = model.head  # which is int8
    tokens = checkpoints.golden_sequence("gqa2")
    logits = dense_logits(model, tokens)
    np.testing.assert_allclose(logits, dense_logits(wide, tokens), atol=2e-4)
    convert(resolve(str(tmp_path / "narrow")), tmp_path / "narrow", tmp_path / "out", dtype=None)
    again = find_weights(tmp_path / "out", config)
    assert again.is_converted and again.quantization == form
    np.testing.assert_array_equal(dense_logits(again.load(dtype=jnp.float32, quantization=form), tokens), logits)


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


def static(dtype, **changed):
    """A config of which all activations have stored scales."""
    kind = "int" if dtype == INT8 else "float"
    raw = compressed(f"{kind}-quantized", strategy="channel", type=kind)
    inputs = {"num_bits": 8, "type": kind, "strategy": "tensor", "dynamic": False, "symmetric": True}
    raw["config_groups"]["group_0"]["input_activations"] = inputs | changed
    return raw


def write_static(folder, dtype=FP8):
    """Its input scales are 1, 2, 3, ... in the order of the projections' names."""
    stored, _ = write(folder, "channel", dtype, quantization=static(dtype))
    names = sorted(name for name in stored if name.endswith("input_scale"))
    scales = {name: np.full(1, number, np.float32) for number, name in enumerate(names, 1)}
    checkpoints.write_tensors(folder, stored | scales)
    return stored | scales


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("dtype", [FP8, INT8])
def test_stored_scales_of_inputs_are_read_and_converted(tmp_path, dtype, num_shards):
    scales = write_static(tmp_path, dtype)
    config, form = LlamaConfig.from_file(tmp_path), EightBit.of(dtype)
    stored = find_weights(tmp_path, config)
    assert stored.activations is Activations.STATIC
    mesh = make_mesh(num_shards) if num_shards > 1 else None
    how = {"dtype": jnp.float32, "mesh": mesh, "quantization": form, "rounding": Rounding(is_static=True)}
    model = stored.load(**how)
    found = flat(model)
    assert found["layers.1.mlp.down.input_scale"] == scales["model.layers.1.mlp.down_proj.input_scale"]
    fused = [scales[f"model.layers.1.self_attn.{name}_proj.input_scale"] for name in "qkv"]
    assert found["layers.1.attention.qkv.input_scale"] == max(fused)
    assert "head.input_scale" not in found
    on_one = model if mesh is None else stored.load(**how | {"mesh": None})
    save_orbax(on_one, tmp_path / CONVERTED, config, activations=Activations.STATIC)
    again = find_weights(tmp_path, config)
    assert again.is_converted and again.activations is Activations.STATIC
    for name, value in flat(again.load(**how)).items():
        np.testing.assert_array_equal(value, found[name])
    exact = flat(again.load(**how | {"rounding": None}))  # for a chip that does not round
    assert exact.keys() == {name for name in found if not name.endswith("input_scale")}


def test_without_stored_scales_each_token_has_its_own(tmp_path):
    stored = write_static(tmp_path)
    checkpoints.write_tensors(tmp_path, {name: value for name, value in stored.items() if "input_scale" not in name})
    assert find_weights(tmp_path, LlamaConfig.from_file(tmp_path)).activations is Activations.DYNAMIC


def test_a_scale_of_inputs_that_is_not_positive_is_named(tmp_path):
    stored = write_static(tmp_path)
    name = "model.layers.0.mlp.up_proj.input_scale"
    checkpoints.write_tensors(tmp_path, stored | {name: np.zeros(1, np.float32)})
    with pytest.raises(ValueError, match=r"up_proj\.input_scale must be a positive number: 0"):
        load_hf(tmp_path, LlamaConfig.from_file(tmp_path), dtype=jnp.float32, quantization=EightBit.FP8,
                rounding=Rounding(is_static=True))  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "activations"),
    [
        ({}, Activations.STATIC),
        ({"symmetric": False}, Activations.DYNAMIC),
        ({"strategy": "token", "dynamic": True}, Activations.DYNAMIC),
        (None, Activations.EXACT),
    ],
)
def test_the_config_says_whether_activations_are_rounded(tmp_path, changed, activations):
    raw = static(FP8, **(changed or {}))
    if changed is None:
        raw["config_groups"]["group_0"]["input_activations"] = None
    write(tmp_path, "channel", FP8, quantization=raw)
    assert find_weights(tmp_path, LlamaConfig.from_file(tmp_path)).activations is activations
