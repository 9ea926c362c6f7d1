"""Checkpoints of 4-bit weights, packed here from the formats' descriptions, against the values that were packed."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from model.config import LlamaConfig
from model.families import LLAMA
from model.loading.source import CONVERTED, resolve
from model.loading.stored_weights import find_weights
from model.network.eight_bit import quantize
from model.quantization.forms import EightBit
from scripts.convert_checkpoint import convert
from tests.model import checkpoints, packers
from tests.model.loaded import assert_equal, flat, load, load_wide

pytestmark = pytest.mark.slow

quantized = jax.jit(quantize, static_argnums=1)


@dataclass(frozen=True)
class Format:
    """A way to pack a checkpoint, and how its config says so."""

    pack: Callable[[packers.Quantized], dict[str, np.ndarray]]
    config: Callable[[int], dict[str, Any]]
    bits: int = 4
    symmetric: bool = False
    ordered: bool = False


def gptq(version: int = 1, **options) -> Format:
    said = {"checkpoint_format": "gptq_v2"} if version == 2 else {}
    form = Format(lambda kernel: packers.gptq(kernel, version=version), lambda group: {}, **options)
    said |= {"bits": form.bits, "sym": form.symmetric, "desc_act": form.ordered}
    return Format(form.pack, lambda group: {"quant_method": "gptq", "group_size": group} | said, **options)


def compressed(**options) -> Format:
    form = Format(packers.compressed_tensors, lambda group: {}, **options)

    def config(group: int) -> dict[str, Any]:
        weights = {"num_bits": form.bits, "type": "int", "strategy": "group", "group_size": group}
        weights |= {"symmetric": form.symmetric, "actorder": "group" if form.ordered else None}
        groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
        return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups,
                "ignore": ["lm_head"]}  # fmt: skip

    return Format(
        lambda kernel: packers.compressed_tensors(kernel, symmetric=form.symmetric, ordered=form.ordered),
        config,
        **options,
    )


def awq_config(group: int) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}


FORMATS = {
    "gptq sym": gptq(symmetric=True),
    "gptq": gptq(),
    "gptq v2": gptq(version=2),
    "gptq v2 sym": gptq(version=2, symmetric=True),
    "gptq desc_act": gptq(ordered=True),
    "gptq 8 bits": gptq(bits=8),
    "awq": Format(packers.awq, awq_config),
    "compressed-tensors sym": compressed(symmetric=True),
    "compressed-tensors": compressed(),
    "compressed-tensors actorder": compressed(ordered=True),
    "compressed-tensors 8 bits": compressed(symmetric=True, bits=8),
}


def write(
    folder, format: Format, *, group=32, source=None, packed_head=False, variant="gqa2", in_bfloat16=False, left=""
):
    """A checkpoint, its tensors, and the values that these stand for. `in_bfloat16`: the float16 scales are in that
    type, too. `left` matches modules that are not packed."""
    if source is None:
        checkpoints.write(folder, variant)
        given = checkpoints.tensors(variant)
    else:
        folder.mkdir()
        (folder / "config.json").write_text((source / "config.json").read_text())
        given = load_file(source / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    modules, stored, values = LLAMA.projections(raw["num_hidden_layers"]), {}, {}
    rng = np.random.default_rng(0)
    for key, weights in given.items():
        module, wide = key.removesuffix(".weight"), weights.astype(np.float32)
        is_packed = module in modules and not re.fullmatch(left, module)
        if not is_packed and not (packed_head and module == "lm_head"):
            stored[key], values[key] = weights, wide
            continue
        order = rng.permutation(wide.shape[1]) if format.ordered else None
        size = wide.shape[1] if group == -1 else group
        kernel = packers.quantized(wide, bits=format.bits, group=size, symmetric=format.symmetric, order=order)
        if in_bfloat16:
            kernel = dataclasses.replace(kernel, scales=kernel.scales.astype(ml_dtypes.bfloat16).astype(np.float16))
        stored |= {f"{module}.{name}": part for name, part in format.pack(kernel).items()}
        values[key] = kernel.weights()
    checkpoints.write_tensors(folder, stored)
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": format.config(group)}))
    return stored, values


@pytest.mark.parametrize("num_shards", [1, 4])  # KV heads are repeated for four, and groups cross the cuts
@pytest.mark.parametrize("name", FORMATS)
def test_every_weight_is_the_one_that_was_packed(tmp_path, name, num_shards):
    """And is quantised as the same weights of a checkpoint that is not packed."""
    _, values = write(tmp_path / "packed", FORMATS[name])
    for form in (None, EightBit.INT8):
        wanted = load_wide(tmp_path / "wide", values, form, num_shards)
        assert_equal(load(tmp_path / "packed", form, num_shards), wanted)


@pytest.mark.parametrize("name", ["gptq sym", "awq", "compressed-tensors sym"])
def test_projections_that_are_left_out_stay_next_to_4_bits(tmp_path, name):
    stored, _ = write(tmp_path, FORMATS[name], left=r".*\.(down|v)_proj")
    found = find_weights(tmp_path, LlamaConfig.from_file(tmp_path))
    assert {path for path, _ in found.four_bit.others} == {
        f"layers.{i}.{part}" for i in range(3) for part in ("mlp.down", "attention.qkv.v_proj")
    }
    for form in (found.four_bit, found.exact_form):
        kept = load(tmp_path, form)
        np.testing.assert_array_equal(kept["layers.1.mlp.down.kernel"], stored["model.layers.1.mlp.down_proj.weight"])
        assert kept["layers.1.mlp.gate_up.kernel"].dtype == kept["layers.1.attention.qkv.q_proj.kernel"].dtype == "int4"


@pytest.mark.parametrize("group", [16, 24, -1])  # 24 divides neither 64 inputs nor 160
@pytest.mark.parametrize("name", ["gptq", "awq", "compressed-tensors"])
def test_groups_of_any_size_are_read(tmp_path, name, group):
    _, values = write(tmp_path / "packed", FORMATS[name], group=group)
    found, wanted = load(tmp_path / "packed", None), load_wide(tmp_path / "wide", values, None)
    np.testing.assert_array_equal(found["layers.1.mlp.down.kernel"], wanted["layers.1.mlp.down.kernel"])


def test_a_head_may_be_packed_too(tmp_path):
    _, values = write(tmp_path / "packed", FORMATS["gptq"], packed_head=True)
    np.testing.assert_array_equal(load(tmp_path / "packed", None)["head.kernel"], values["lm_head.weight"])


def test_zeros_of_symmetric_gptq_need_not_be_there_nor_true(tmp_path):
    stored, _ = write(tmp_path, FORMATS["gptq sym"])
    wanted = load(tmp_path, None)
    for key in [key for key in stored if key.endswith(".qzeros")]:
        stored[key] = np.zeros_like(stored[key])
    checkpoints.write_tensors(tmp_path, stored)
    np.testing.assert_array_equal(load(tmp_path, None)["layers.0.mlp.down.kernel"], wanted["layers.0.mlp.down.kernel"])
    checkpoints.write_tensors(tmp_path, {key: value for key, value in stored.items() if not key.endswith(".qzeros")})
    np.testing.assert_array_equal(load(tmp_path, None)["layers.0.mlp.down.kernel"], wanted["layers.0.mlp.down.kernel"])


def test_what_is_missing_mis_shaped_or_too_much_is_named(tmp_path):
    stored, _ = write(tmp_path, FORMATS["gptq desc_act"])
    del stored["model.layers.0.mlp.up_proj.g_idx"]
    stored["model.layers.1.mlp.up_proj.scales"] = np.ones((3, 3), np.float16)
    stored["model.layers.2.mlp.up_proj.qweight"] = stored["model.layers.2.mlp.up_proj.qweight"].astype(np.int64)
    stored["model.layers.2.mlp.down_proj.weight"] = np.ones((64, 160), np.float32)
    checkpoints.write_tensors(tmp_path, stored)
    with pytest.raises(ValueError, match="does not hold") as error:
        find_weights(tmp_path, LlamaConfig.from_file(tmp_path))
    text = str(error.value)
    assert "missing: model.layers.{0}.mlp.up_proj.g_idx" in text
    assert "unexpected: model.layers.{2}.mlp.down_proj.g_idx, " in text
    assert "{1}.mlp.up_proj.scales has shape (3, 3), not (2, 160)" in text
    assert "{2}.mlp.up_proj.qweight has type I64, not one of I32" in text


def test_groups_that_are_not_there_are_refused(tmp_path):
    stored, _ = write(tmp_path, FORMATS["gptq desc_act"])
    stored["model.layers.1.mlp.up_proj.g_idx"][5] = 2
    checkpoints.write_tensors(tmp_path, stored)
    with pytest.raises(ValueError, match=r"layers.1.mlp.up_proj.g_idx names groups outside of 0 to 1"):
        load(tmp_path, EightBit.INT8)


def test_a_conversion_holds_what_loading_makes(tmp_path, capsys):
    folder, out = tmp_path / "packed", tmp_path / "out"
    write(folder, FORMATS["awq"])
    convert(resolve(str(folder)), folder, out, dtype=None)
    assert "projections and head are int8, requantised from AWQ int4" in capsys.readouterr().out
    config = LlamaConfig.from_file(out)
    assert config.quantized is None
    stored = find_weights(out, config)
    assert (stored.path.name, stored.quantization) == (CONVERTED, EightBit.INT8)
    assert_equal(flat(stored.load(dtype=jnp.float32, quantization=EightBit.INT8)), load(folder, EightBit.INT8))
