"""Projections in 4 bits: kept from the checkpoints that fit, or rounded at load; their conversions; and their chips."""

from __future__ import annotations

import dataclasses

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.config import LlamaConfig
from model.execution.memory_plan import weights_bytes
from model.loading.hf_format import expected_shapes
from model.loading.source import CONVERTED, resolve
from model.loading.stored_weights import find_weights
from model.loading.weights import load_hf
from model.network.eight_bit import quantize
from model.network.four_bit import quantize_groups
from model.network.sharding import abstract_model, make_mesh
from model.presets import preset
from model.quantization.forms import EightBit, FourBit
from scripts.convert_checkpoint import convert
from tests.model import checkpoints, gguf_files
from tests.model.dense_attention import dense_logits
from tests.model.dequantized import dequantize_groups
from tests.model.gguf_files import Type
from tests.model.loaded import assert_equal, flat, load
from tests.model.loading.test_gguf import random_blocks
from tests.model.loading.test_packed_checkpoints import FORMATS, write
from tests.model.network.test_llama import TINY

PROJECTIONS = ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")
KEPT = ("gptq sym", "gptq", "gptq v2", "awq", "compressed-tensors sym", "compressed-tensors")


def dequantized(found, module):
    """f32[out, in] of a projection."""
    parts = [found.get(f"{module}.{name}") for name in ("kernel", "scale", "zero")]
    assert (parts[0].dtype, parts[1].dtype) == (jnp.int4, jnp.bfloat16)
    return np.asarray(dequantize_groups(*parts))


def projections(found):
    return [
        f"layers.{layer}.{part}"
        for layer in range(3)
        for part in PROJECTIONS
        if f"layers.{layer}.{part}.kernel" in found
    ]


GROUPS = (16, 2, 16), (32, 1, 32), (64, 1, 32), (-1, 1, 32)  # for two chips the only KV head is repeated


@pytest.mark.parametrize(  # with zeros and without, each of the groups
    ("name", "group", "num_shards", "wanted"),
    [(name, *GROUPS[i // 2 + turn]) for i, name in enumerate(KEPT) for turn in (0, 1)],
)
def test_packed_weights_are_kept(tmp_path, name, group, num_shards, wanted):
    """Exactly, if the scales are bfloat16. Larger groups than the model's sizes have in common repeat their scales."""
    _, values = write(tmp_path / "packed", FORMATS[name], group=group, variant="mqa", in_bfloat16=True)
    stored = find_weights(tmp_path / "packed", LlamaConfig.from_file(tmp_path / "packed"))
    form = FourBit(group=wanted, has_zeros="sym" not in name)
    assert (stored.four_bit, stored.four_bit_fault, stored.quantization) == (form, None, EightBit.INT8)
    found = load(tmp_path / "packed", form, num_shards)
    checkpoints.write(tmp_path / "wide", "mqa")
    checkpoints.write_tensors(tmp_path / "wide", values)
    exact = load(tmp_path / "wide", None, num_shards)
    assert len(projections(found)) == 12
    for module in projections(found):
        np.testing.assert_array_equal(dequantized(found, module), exact[f"{module}.kernel"])
    head, scale = jax.jit(quantize, static_argnums=1)(exact["head.kernel"], EightBit.INT8)
    np.testing.assert_array_equal(found["head.kernel"], head)
    np.testing.assert_array_equal(found["head.scale"], scale)


def test_scales_of_float16_are_rounded_to_bfloat16(tmp_path):
    _, values = write(tmp_path, FORMATS["awq"])
    found = load(tmp_path, FourBit(group=32, has_zeros=True))
    wanted = values["model.layers.1.mlp.down_proj.weight"]
    np.testing.assert_allclose(dequantized(found, "layers.1.mlp.down"), wanted, rtol=2.0**-8)
    assert (dequantized(found, "layers.1.mlp.down") != wanted).any()


@pytest.mark.parametrize(
    ("name", "group", "fault"),
    [
        ("gptq desc_act", 32, "not of neighbouring inputs"),
        ("compressed-tensors actorder", 32, "not of neighbouring inputs"),
        ("gptq 8 bits", 32, "8 bits"),
        ("awq", 24, "groups of 24 do not divide the numbers of inputs (64, 64, 160)"),
    ],
)
def test_weights_that_do_not_fit_have_a_reason(tmp_path, name, group, fault):
    write(tmp_path, FORMATS[name], group=group)
    stored = find_weights(tmp_path, LlamaConfig.from_file(tmp_path))
    assert stored.four_bit is None
    assert fault in stored.four_bit_fault


def test_groups_that_are_not_as_the_config_says_are_refused(tmp_path):
    stored, _ = write(tmp_path, FORMATS["gptq"])
    stored["model.layers.1.mlp.up_proj.g_idx"][[0, 40]] = [1, 0]
    checkpoints.write_tensors(tmp_path, stored)
    with pytest.raises(ValueError, match=r"layers.1.mlp.up_proj: .* --quantization int8"):
        load(tmp_path, FourBit(group=32, has_zeros=True))
    load(tmp_path, EightBit.INT8)


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("type", [Type.Q4_0, Type.Q4_K])
def test_blocks_of_gguf_are_kept(tmp_path, type, num_shards):
    folder = checkpoints.write(tmp_path / "source", "gqa2")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_layers": 1}
    config = dataclasses.replace(LlamaConfig.from_file(folder), **sizes)
    rng = np.random.default_rng(0)
    wide = {
        key: np.ones(shape, np.float32) if len(shape) == 1 else rng.standard_normal(shape).astype(np.float32)
        for key, shape in expected_shapes(config).items()
    }

    def packed(key, rows):
        if type is Type.Q4_0:
            return gguf.quants.quantize(np.ascontiguousarray(rows), type), type
        blocks = random_blocks(rng, rows.shape, type)
        per_row = blocks.reshape(rows.shape[0], -1, 144)
        per_row[0, 0, 4] = per_row[1, 0, 4] = 0  # the first group of a block has no scale: only a minimum
        per_row[1, 0, 8] = 0  # and not even that
        return blocks, type

    path = gguf_files.write(tmp_path / "model.gguf", config, wide, packed=packed)
    stored = find_weights(path, resolve(str(path)).config)
    form = FourBit(group=32, has_zeros=type is Type.Q4_K)
    assert (stored.four_bit, stored.four_bit_fault) == (form, None)
    found, exact = load(path, form, num_shards), load(path, None, num_shards)
    modules = projections(found)
    assert len(modules) == 4
    for module in modules:
        wanted = exact[f"{module}.kernel"].reshape(-1, 32)
        # Scales and zeros are rounded to 8 bits.
        error = np.abs(dequantized(found, module).reshape(-1, 32) - wanted)
        assert (error <= 2.0**-7 * np.abs(wanted).max(axis=1, keepdims=True)).all()


def test_a_gguf_of_several_types_is_not_kept(tmp_path):
    folder = checkpoints.write(tmp_path / "source", "gqa2")
    config, tensors = LlamaConfig.from_file(folder), checkpoints.tensors("gqa2")
    mixed = {True: Type.Q8_0, False: Type.Q4_0}

    def packed(key, rows):
        type = mixed["v_proj" in key]
        return gguf.quants.quantize(np.ascontiguousarray(rows, np.float32), type), type

    path = gguf_files.write(tmp_path / "model.gguf", config, tensors, packed=packed)
    stored = find_weights(path, resolve(str(path)).config)
    assert (stored.four_bit, stored.four_bit_fault) == (None, "its projections are not all Q4_0 or all Q4_K")


@pytest.mark.parametrize("num_shards", [1, 2])
def test_weights_are_rounded_at_load_on_any_number_of_chips(tmp_path, num_shards):
    folder = checkpoints.write(tmp_path, "gqa2")
    found, exact = load(folder, FourBit(group=16), num_shards), load(folder, None, num_shards)
    for module in projections(found):
        kernel, scale = jax.jit(quantize_groups, static_argnums=1)(exact[f"{module}.kernel"], 16)
        np.testing.assert_array_equal(found[f"{module}.kernel"], kernel)
        np.testing.assert_array_equal(found[f"{module}.scale"], scale)
    assert found["head.kernel"].dtype == np.int8


def test_logits_are_those_of_the_dequantised_weights_on_every_number_of_chips(tmp_path):
    write(tmp_path, FORMATS["awq"], group=16, in_bfloat16=True)
    config, tokens = LlamaConfig.from_file(tmp_path), checkpoints.golden_sequence("gqa2")
    form = FourBit(group=16, has_zeros=True)
    exact = load_hf(tmp_path, config, dtype=jnp.float32)
    models = [
        load_hf(tmp_path, config, dtype=jnp.float32, mesh=mesh, quantization=form) for mesh in (None, make_mesh(2))
    ]
    one, two = (np.asarray(dense_logits(model, tokens)) for model in models)
    np.testing.assert_allclose(one, two, atol=2e-5)
    exact.head = models[0].head
    np.testing.assert_allclose(one, np.asarray(dense_logits(exact, tokens)), atol=3e-5)


def test_groups_that_chips_would_cut_are_refused():
    config = dataclasses.replace(TINY, hidden_size=64, intermediate_size=160, head_dim=16)
    with pytest.raises(ValueError, match=r"intermediate_size: 80 inputs on each.*--tensor-parallel-size"):
        abstract_model(config, dtype=jnp.bfloat16, mesh=make_mesh(2), quantization=FourBit(group=32))


def test_four_bits_are_counted_as_half_a_byte():
    config = preset("llama-3.1-8b")
    model = abstract_model(config, dtype=jnp.bfloat16, quantization=FourBit(group=128))
    layer = (6144 + 4096) * 4096 + 3 * 14336 * 4096
    weights = config.num_layers * (layer // 2 + layer // 128 * 2 + 2 * 4096 * 2) + 4096 * 2
    head = 128256 * (4096 + 4)
    assert weights_bytes(model) == weights + head + 128256 * 4096 * 2


@pytest.mark.parametrize(
    ("packed", "said"),
    [(True, "projections are int4, groups of 32 with zero points, and the head is int8, kept from AWQ int4"),
     (False, "projections are int4, groups of 32, and the head is int8")],
)  # fmt: skip
def test_a_conversion_holds_what_loading_makes(tmp_path, capsys, packed, said):
    folder, out = tmp_path / "source", tmp_path / "out"
    if packed:
        write(folder, FORMATS["awq"])
    else:
        checkpoints.write(folder, "gqa2")
    convert(resolve(str(folder)), folder, out, dtype="float32", quantization="int4")
    assert said in capsys.readouterr().out
    form = FourBit(group=32, has_zeros=packed)
    stored = find_weights(out, LlamaConfig.from_file(out))
    assert (stored.path.name, stored.quantization) == (CONVERTED, form)
    assert_equal(flat(stored.load(dtype=jnp.float32, quantization=form)), load(folder, form))
    with pytest.raises(ValueError, match=r"holds int4-g32.*int8 is asked for"):
        stored.load(dtype=jnp.float32, quantization=EightBit.INT8)
