"""Checkpoints of kernels that public libraries have packed, against the weights that those libraries read from them."""

from __future__ import annotations

import json
from functools import cache

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from model.config import LlamaConfig
from model.families import LLAMA
from model.loading.remote_tensors import RemoteTensors
from model.loading.stored_weights import find_weights
from model.network.eight_bit import quantize
from model.quantization.forms import EightBit, FourBit, ScaleFormat
from tests.model import checkpoints, nvfp4
from tests.model.dequantized import dequantize, dequantize_groups
from tests.model.goldens import make as make_goldens
from tests.model.loaded import assert_equal, load

PACKED = ("ct int4", "ct int4 zeros", "ct int4 actorder", "ct int4 rows", "ct int8 packed", "awq", "gptq int4",
          "gptq int8", "gptq zeros", "gptq_v2 zeros", "ct nvfp4")  # fmt: skip
KEPT = ("ct int4", "ct int4 zeros", "ct int4 rows", "awq", "gptq int4", "gptq zeros", "gptq_v2 zeros")
IN_BYTES = ("ct int8", "ct fp8", "ct fp8 tensor", "ct fp8 blocks")
WIDTH = 32  # of every projection's inputs and outputs


@cache
def goldens() -> dict[str, np.ndarray]:
    with np.load(make_goldens.FOLDER / "packed.npz") as file:
        return dict(file)


def test_all_goldens_are_read():
    assert {key.split("/")[0] for key in goldens()} == {*PACKED, *IN_BYTES}


def write(folder, name, renamed=None):
    """A checkpoint of one layer with the golden kernel as each of its projections, with other names of its tensors."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "num_attention_heads": 2, "num_key_value_heads": 2}
    checkpoints.write(folder, "gqa2")
    raw = json.loads((folder / "config.json").read_text()) | sizes | {"head_dim": WIDTH // 2, "num_hidden_layers": 1}
    raw["quantization_config"] = json.loads(str(goldens()[f"{name}/config"]))
    (folder / "config.json").write_text(json.dumps(raw))
    rng = np.random.default_rng(0)
    given = {key: value for key, value in goldens().items() if key.startswith(f"{name}/")}
    of_kernel = {key.split("/")[1]: value for key, value in given.items()}
    weights = of_kernel.pop("weights")
    of_kernel.pop("config")
    if "fp8" in name or "nvfp4" in name:
        narrow = "weight" if "fp8" in name else "weight_scale"
        of_kernel[narrow] = of_kernel[narrow].view(ml_dtypes.float8_e4m3fn)
    of_kernel = {(renamed or {}).get(key, key): value for key, value in of_kernel.items()}
    vocab = raw["vocab_size"]
    tensors = {key: rng.standard_normal((vocab, WIDTH)).astype(np.float32) for key in EMBEDDINGS}
    tensors |= {key: np.ones(WIDTH, np.float32) for key in NORMS}
    for module in LLAMA.projections(1):
        tensors |= {f"{module}.{key}": np.ascontiguousarray(value) for key, value in of_kernel.items()}
    checkpoints.write_tensors(folder, tensors)
    return weights


EMBEDDINGS = ("model.embed_tokens.weight", "lm_head.weight")
NORMS = ("model.norm.weight", "model.layers.0.input_layernorm.weight", "model.layers.0.post_attention_layernorm.weight")
NUM_FUSED = {"attention.qkv": 3, "attention.out": 1, "mlp.gate_up": 2, "mlp.down": 1}


@pytest.mark.parametrize("name", PACKED)
def test_packed_kernels_are_the_weights_of_the_library(tmp_path, name):
    weights = write(tmp_path, name)
    found = load(tmp_path, None)
    for module, copies in NUM_FUSED.items():
        np.testing.assert_array_equal(found[f"layers.0.{module}.kernel"], np.tile(weights, (copies, 1)))


def test_modelopts_nvfp4_is_read_with_its_own_config_alone(tmp_path):
    renamed = {"weight_packed": "weight", "weight_global_scale": "weight_scale_2"}
    weights = write(tmp_path, "ct nvfp4", renamed)
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    stated = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": stated}))
    tensors = {key: one[...] for key, one in RemoteTensors(tmp_path / "model.safetensors").slices().items()}
    inverse = {key: np.reciprocal(value).reshape(()) for key, value in tensors.items() if "weight_scale_2" in key}
    checkpoints.write_tensors(tmp_path, tensors | inverse)
    found = load(tmp_path, None)["layers.0.mlp.down.kernel"]
    np.testing.assert_allclose(found, weights, rtol=2.0**-22)
    stored = find_weights(tmp_path, LlamaConfig.from_file(tmp_path))
    form = FourBit(group=16, numbers=ScaleFormat.NVFP4)
    assert (stored.packing, stored.quantization, stored.four_bit) == ("ModelOpt NVFP4", EightBit.INT8, form)
    kept = load(tmp_path, form)
    parts = [kept[f"layers.0.mlp.down.{part}"] for part in ("kernel", "scale", "row_scale")]
    np.testing.assert_allclose(nvfp4.dequantized(*parts), weights, rtol=2.0**-22)
    checkpoints.write_tensors(tmp_path, tensors | {key: np.full((), np.nan, np.float32) for key in inverse})
    with pytest.raises(ValueError, match=r"weight_scale_2 must be a positive number: nan"):
        load(tmp_path, None)


@pytest.mark.parametrize("name", KEPT)
def test_4_bits_are_kept(tmp_path, name):
    """Scales are float32 in these files, and are rounded to bfloat16."""
    weights = write(tmp_path, name)
    form = find_weights(tmp_path, LlamaConfig.from_file(tmp_path)).four_bit
    assert isinstance(form, FourBit)
    found = load(tmp_path, form)
    parts = [found.get(f"layers.0.mlp.down.{part}") for part in ("kernel", "scale", "zero")]
    assert parts[0].dtype == jnp.int4
    np.testing.assert_allclose(dequantize_groups(*parts), weights, rtol=2.0**-8)


def test_the_order_in_which_inputs_were_quantised_changes_no_weight(tmp_path):
    """GPTQ of llm-compressor writes `actorder: static` and no tensor of it."""
    write(tmp_path, "ct int8")
    wanted = load(tmp_path, EightBit.INT8)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["quantization_config"]["config_groups"]["group_0"]["weights"]["actorder"] = "static"
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert_equal(load(tmp_path, EightBit.INT8), wanted)


@pytest.mark.parametrize("name", IN_BYTES)
def test_kernels_in_bytes_are_the_weights_of_the_library(tmp_path, name):
    """With scales of blocks they are rounded once more, with one scale per row."""
    weights = write(tmp_path, name)
    form = find_weights(tmp_path, LlamaConfig.from_file(tmp_path)).quantization
    found = load(tmp_path, form)
    kernel, scale = found["layers.0.mlp.down.kernel"], found["layers.0.mlp.down.scale"]
    assert kernel.dtype == form.dtype
    if name == "ct fp8 blocks":
        wanted = jax.jit(quantize, static_argnums=1)(weights, form)
        np.testing.assert_array_equal(dequantize(kernel, scale), dequantize(*wanted))
    else:
        np.testing.assert_array_equal(dequantize(kernel, scale), weights)
