"""NVFP4 kept in 4 bits, from the parameters to the logits, against weights dequantised in float64."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from model.config import LlamaConfig
from model.execution.memory_plan import weights_bytes
from model.loading.hf_format import expected_shapes
from model.loading.source import resolve
from model.loading.stored_weights import find_weights
from model.loading.weights import load_hf
from model.network.four_bit import halves_of
from model.network.linear import linear_method
from model.network.packed import pack_for_tpu
from model.network.sharding import abstract_model, make_mesh
from model.presets import preset
from model.quantization.forms import EightBit, FourBit, MixedForms, Plain, ScaleFormat
from scripts.convert_checkpoint import convert
from tests.model import checkpoints, nvfp4
from tests.model.dense_attention import dense_logits
from tests.model.loaded import assert_equal, flat, load, load_wide

pytestmark = pytest.mark.slow

NVFP4 = FourBit(group=16, numbers=ScaleFormat.NVFP4)
NAMES = list(nvfp4.CONFIGS)


def weights_of(found, module):
    """f64[out, in]"""
    parts = [found[f"{module}.{name}"] for name in ("kernel", "scale", "row_scale")]
    assert [part.dtype for part in parts] == [ml_dtypes.int4, ml_dtypes.bfloat16, np.float32]
    return nvfp4.dequantized(*parts)


def source(folder, variant="gqa2", **sizes):
    """A checkpoint that is not quantised."""
    checkpoints.write(folder, variant)
    if sizes:
        config = dataclasses.replace(LlamaConfig.from_file(folder), **sizes)
        raw = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(raw | config.to_hf()))
        rng = np.random.default_rng(0)
        tensors = {key: rng.standard_normal(shape, np.float32) for key, shape in expected_shapes(config).items()}
        checkpoints.write_tensors(folder, tensors)
    return folder


LLAMA_1B = {"hidden_size": 2048, "num_heads": 32, "num_kv_heads": 8, "head_dim": 64, "intermediate_size": 8192}


# For two chips the only KV head of mqa is repeated.
@pytest.mark.parametrize(
    ("variant", "sizes", "num_shards"),
    [("mqa", {}, 1), ("mqa", {}, 2), ("gqa2", LLAMA_1B | {"num_layers": 1}, 2)],
    ids=["small", "small, 2 chips", "a layer of Llama 3.2 1B, 2 chips"],
)
@pytest.mark.parametrize("name", NAMES)
def test_all_weights_are_the_stored_numbers(tmp_path, name, variant, sizes, num_shards):
    """Without any rounding: in float64 they are equal. So are they in float32, and in the computation's type."""
    values = nvfp4.write(tmp_path / "packed", source(tmp_path / "source", variant, **sizes), name)
    stored = find_weights(tmp_path / "packed", LlamaConfig.from_file(tmp_path / "packed"))
    assert (stored.packing, stored.quantization) == (name, EightBit.INT8)
    assert stored.four_bit == stored.exact_form == NVFP4
    found = load(tmp_path / "packed", NVFP4, num_shards)
    (tmp_path / "wide").mkdir()
    (tmp_path / "wide/config.json").write_text((tmp_path / "source/config.json").read_text())
    wide = load_wide(tmp_path / "wide", {key: x.astype(np.float32) for key, x in values.items()}, None, num_shards)
    modules = [key.removesuffix(".row_scale") for key in found if key.endswith(".row_scale")]
    assert len(modules) == 4 * stored.config.num_layers
    for module in modules:
        np.testing.assert_array_equal(weights_of(found, module).astype(np.float32), wide[f"{module}.kernel"])
    down = values["model.layers.0.mlp.down_proj.weight"]
    np.testing.assert_array_equal(weights_of(found, "layers.0.mlp.down"), down)
    for name in ("head.kernel", "embedding"):  # left alone, as their writers leave them
        np.testing.assert_array_equal(found[name], wide[name])


def parameters():
    """Of a kernel [48, 64]: all codes, and scales of all sizes of e4m3, from the least to the largest."""
    rng = np.random.default_rng(0)
    scale = rng.integers(1, 0x7F, (48, 4)).astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(ml_dtypes.bfloat16)
    kernel = rng.integers(-7, 8, (48, 64)).astype(ml_dtypes.int4)
    return {"kernel": kernel, "scale": scale, "row_scale": rng.uniform(1e-5, 1e-3, (48, 1)).astype(np.float32)}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("num_chips", [None, 1, 2])
def test_a_product_has_the_exact_weights(num_chips, dtype):
    """In bfloat16, too: each row of inputs picks a column, so a wrong bit of a weight would show. By XLA's product and
    by that of TPUs, whose chips share the inputs or the outputs."""
    weights = parameters()
    expected = nvfp4.dequantized(**weights).T.astype(np.float32)
    method, inputs = linear_method(NVFP4), jnp.eye(64, dtype=dtype)
    if num_chips is None:
        product = jax.jit(lambda weights: method.apply(inputs, weights, jnp.float32))(weights)
        np.testing.assert_array_equal(product, expected)
        return
    mesh = make_mesh(num_chips)
    for axes in ((None, None), ("tensor", None), (None, "tensor")):
        on_tpu = method.on_tpu(mesh, axes, interpret=True)
        turned = {name: jnp.asarray(value.T) for name, value in weights.items()}
        np.testing.assert_array_equal(on_tpu.apply(inputs, turned, jnp.float32), expected)


def test_codes_are_decoded_alike_in_all_types():
    codes = jnp.arange(-7, 8).astype(jnp.int4)
    halves = np.concatenate([-2 * nvfp4.MAGNITUDES[:0:-1], 2 * nvfp4.MAGNITUDES])
    for dtype in (jnp.bfloat16, jnp.float32):
        for decode in (halves_of, jax.jit(halves_of, static_argnums=1)):
            np.testing.assert_array_equal(np.asarray(decode(codes, dtype), np.float64), halves)


def test_weights_are_rounded_to_the_nearest_numbers():
    """Of a model that is not loaded from NVFP4, such as one with random weights."""
    rng = np.random.default_rng(0)
    given = rng.standard_normal((32, 64)).astype(np.float32)
    given[0], given[1, :16] = 0, 0
    made = jax.jit(linear_method(NVFP4).quantize)(given)
    kernel, scale, row_scale = (np.asarray(made[name]) for name in ("kernel", "scale", "row_scale"))
    found = nvfp4.dequantized(kernel, scale, row_scale)
    numbers = np.concatenate([nvfp4.MAGNITUDES, -nvfp4.MAGNITUDES]) * 2
    steps = np.repeat(scale.astype(np.float64), 16, axis=1) * row_scale
    nearest = np.abs(given[:, :, None] - steps[:, :, None] * numbers).min(axis=2)
    np.testing.assert_allclose(np.abs(found - given), nearest, atol=1e-6)
    assert np.abs(found - given).max() < 0.2 * np.abs(given).max()
    given[2, 3], given[3, 20] = np.nan, np.inf
    bad = np.asarray(linear_method(NVFP4).quantize(jnp.asarray(given))["scale"], np.float32)
    assert not np.isfinite(bad[2, 0]) and not np.isfinite(bad[3, 1])


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_dequantised_weights(tmp_path, name):
    """On one chip and on two, by XLA's products and by those of TPUs."""
    values = nvfp4.write(tmp_path / "packed", source(tmp_path / "source"), name)
    checkpoints.write_tensors(tmp_path / "source", {key: x.astype(np.float32) for key, x in values.items()})
    config, tokens = LlamaConfig.from_file(tmp_path / "source"), checkpoints.golden_sequence("gqa2")
    expected = np.asarray(dense_logits(load_hf(tmp_path / "source", config, dtype=jnp.float32), tokens))
    config = LlamaConfig.from_file(tmp_path / "packed")
    for mesh in (None, make_mesh(2)):
        model = load_hf(tmp_path / "packed", config, dtype=jnp.float32, mesh=mesh, quantization=NVFP4)
        for found in (dense_logits(model, tokens), dense_logits(pack_for_tpu(model, mesh, interpret=True), tokens)):
            np.testing.assert_allclose(np.asarray(found), expected, atol=3e-5)


def test_projections_that_are_left_out_stay_as_they_are(tmp_path):
    values = nvfp4.write(tmp_path / "packed", source(tmp_path / "source"), NAMES[1], left=r".*\.(down|v)_proj")
    stored = find_weights(tmp_path / "packed", LlamaConfig.from_file(tmp_path / "packed"))
    assert isinstance(stored.four_bit, MixedForms) and {form for _, form in stored.four_bit.others} == {Plain()}
    found = load(tmp_path / "packed", stored.four_bit, 2)
    for part, key in (("mlp.down", "mlp.down_proj"), ("attention.qkv.v_proj", "self_attn.v_proj")):
        np.testing.assert_array_equal(found[f"layers.1.{part}.kernel"], values[f"model.layers.1.{key}.weight"])
    keys = values["model.layers.1.self_attn.k_proj.weight"]
    np.testing.assert_array_equal(weights_of(found, "layers.1.attention.qkv.k_proj"), keys)


@pytest.mark.parametrize("variant", ["gqa2", "tied"])
def test_a_conversion_holds_the_same_bits(tmp_path, capsys, variant):
    folder, out = tmp_path / "packed", tmp_path / "out"
    nvfp4.write(folder, source(tmp_path / "source", variant), NAMES[0])
    convert(resolve(str(folder)), folder, out, dtype="float32", quantization="int4")
    said = "projections are NVFP4, groups of 16, and the head is the type of the computation, kept from ModelOpt NVFP4"
    assert said in capsys.readouterr().out
    stored = find_weights(out, LlamaConfig.from_file(out))
    assert stored.quantization == NVFP4
    for mesh, chips in ((None, 1), (make_mesh(2), 2)):
        found = flat(stored.load(dtype=jnp.float32, quantization=NVFP4, mesh=mesh))
        assert_equal(found, load(folder, NVFP4, chips))


def test_the_memory_plan_counts_five_bits_a_weight():
    config = preset("llama-3.1-70b")
    model = abstract_model(config, dtype=jnp.bfloat16, quantization=NVFP4)
    rows = (8192 + 2 * 1024) + 8192 + 2 * 28672 + 8192
    weights = (8192 + 2 * 1024) * 8192 + 8192 * 8192 + 3 * 28672 * 8192
    layers = config.num_layers * (weights * 5 // 8 + 4 * rows + 2 * 2 * 8192)
    assert weights_bytes(model) == layers + 2 * 2 * 128256 * 8192 + 2 * 8192
    tied = abstract_model(preset("llama-3.2-1b"), dtype=jnp.bfloat16, quantization=NVFP4)
    assert tied.head is None  # it is the embedding, as without quantisation


def test_nvfp4_has_one_group_size_and_no_zeros():
    for wrong in ({"group": 32}, {"group": 16, "has_zeros": True}):
        with pytest.raises(ValueError, match="NVFP4 has groups of 16 inputs without zeros"):
            FourBit(numbers=ScaleFormat.NVFP4, **wrong)
