"""The K/V scales of checkpoints, as each writer names and shapes them."""

from __future__ import annotations

import numpy as np
import pytest

from model.config import LlamaConfig
from model.loading.stored_weights import find_weights
from model.quantization.forms import EightBit
from scripts import convert_checkpoint
from tests.model import checkpoints
from tests.model.goldens import make as make_goldens
from tests.model.quantization.test_checkpoint_form import compressed

CONFIG = LlamaConfig.from_hf(make_goldens.config("gqa2"))
RNG = np.random.default_rng(0)
SCALES = RNG.uniform(0.01, 0.1, (CONFIG.num_layers, 2, CONFIG.num_kv_heads)).astype(np.float32)


def ranges(folder, scales):
    """What is read of a checkpoint that has these tensors in its layers' attention."""
    checkpoints.write(folder, "gqa2")
    given = {
        f"model.layers.{i}.self_attn.{name}": np.asarray(x)
        for i, layer in enumerate(scales)
        for name, x in layer.items()
    }
    checkpoints.write_tensors(folder, checkpoints.tensors("gqa2") | given)
    return find_weights(folder, LlamaConfig.from_file(folder)).kv_ranges()


@pytest.mark.parametrize(
    ("key", "value"),
    [("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale"), ("k_proj.output_scale", "v_proj.output_scale")],
)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_scale_a_layer_is_every_head_s(tmp_path, key, value, shape):
    scales = [{key: layer[0, 0].reshape(shape), value: layer[1, 0].reshape(shape)} for layer in SCALES]
    expected = np.broadcast_to(448 * SCALES[:, :, :1], SCALES.shape)
    np.testing.assert_array_equal(ranges(tmp_path, scales), expected)


@pytest.mark.parametrize("shape", [(-1,), (-1, 1), (-1, 1, 1)])
def test_a_scale_for_each_head(tmp_path, shape):
    scales = [{"k_scale": layer[0].reshape(shape), "v_scale": layer[1].reshape(shape)} for layer in SCALES]
    np.testing.assert_array_equal(ranges(tmp_path, scales), 448 * SCALES)


def test_the_old_scale_of_both(tmp_path):
    found = ranges(tmp_path, [{"kv_scale": layer[0, 0]} for layer in SCALES])
    np.testing.assert_array_equal(found, np.broadcast_to(448 * SCALES[:, :1, :1], SCALES.shape))


def test_without_scales_or_with_placeholders_there_are_none(tmp_path):
    assert ranges(tmp_path, []) is None
    ones = {"k_scale": np.ones(1, np.float32), "v_scale": np.ones(1, np.float32)}
    assert ranges(tmp_path, [ones] * CONFIG.num_layers) is None


@pytest.mark.parametrize(
    ("layer", "complaint"),
    [
        ({}, "has 2 K/V scales for 3 layers, and needs 2 each"),
        ({"k_scale": np.float32(-1), "v_scale": np.float32(1)}, r"layers\.1\.self_attn\.k_scale must be one positive"),
        ({"k_scale": np.float32(1), "v_scale": np.float32(np.inf)}, r"layers\.1\.self_attn\.v_scale must be one posit"),
        ({"k_scale": np.ones(7, np.float32)}, "or one for each of the 2 KV heads"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path, layer, complaint):
    scales = [{"k_scale": np.float32(0.5), "v_scale": np.float32(0.25)}, layer]
    with pytest.raises(ValueError, match=complaint):
        ranges(tmp_path, scales)


def test_scales_meant_for_int8_count_so():
    raw = make_goldens.config("gqa2")
    for kind, expected in (("int", EightBit.INT8), ("float", EightBit.FP8)):
        scheme = {"num_bits": 8, "type": kind, "strategy": "tensor"}
        config = LlamaConfig.from_hf(raw | {"quantization_config": compressed() | {"kv_cache_scheme": scheme}})
        assert config.kv_scale_type is expected
    assert CONFIG.kv_scale_type is EightBit.FP8


def test_a_converted_checkpoint_keeps_them(tmp_path):
    checkpoints.write(tmp_path / "hf", "gqa2")
    given = {f"model.layers.{i}.self_attn.{x}_scale": SCALES[i, k] for i in range(3) for k, x in enumerate("kv")}
    checkpoints.write_tensors(tmp_path / "hf", checkpoints.tensors("gqa2") | given)
    convert_checkpoint.main([str(tmp_path / "hf"), str(tmp_path / "out")])
    stored = find_weights(tmp_path / "out", LlamaConfig.from_file(tmp_path / "out"))
    np.testing.assert_array_equal(stored.kv_ranges(), 448 * SCALES)
    assert stored.is_converted
