"""`quantization_config` as the public writers spell it."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.quantization.checkpoint_form import CheckpointForm, read_form
from model.quantization.forms import Activations, EightBit
from model.quantization.packed_form import Layout, PackedForm, Zeros
from tests.examples import examples
from tests.scripts.test_checkpoint_fuzz import HOSTILE, places


def compressed(fmt="float-quantized", ignore=("lm_head",), **weights):
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False} | weights
    activations = {"num_bits": 8, "type": weights["type"], "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": fmt,
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
    }


def packed(**weights):
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True} | weights
    return compressed("pack-quantized", **weights)


KV_ONLY = {
    "quant_method": "compressed-tensors",
    "format": "dense",
    "config_groups": {},
    "ignore": [],
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True},
}


@pytest.mark.parametrize(
    "raw", [KV_ONLY, {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}]
)
def test_with_scales_of_kv_only_the_weights_are_not_quantised(raw):
    assert read_form(raw) == (None, [])


def test_scales_of_kv_in_fewer_bits_are_refused():
    raw = KV_ONLY | {"kv_cache_scheme": KV_ONLY["kv_cache_scheme"] | {"num_bits": 4}}
    assert read_form(raw) == (
        None,
        ["quantization_config.kv_cache_scheme.num_bits=4 is not supported (only 8)"],
    )


INT8, FP8 = EightBit.INT8, EightBit.FP8
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True, "data_type": "int",
              "packing_format": "auto_round:auto_gptq", "autoround_version": "0.8.0"}  # fmt: skip
AUTO_AWQ = {"packing_format": "auto_round:auto_awq", "backend": "auto"}
GPTQ_2 = {"sym": False, "checkpoint_format": "gptq_v2", "bits": 8, "group_size": -1, "desc_act": True}
STATIC = CheckpointForm(form=EightBit.FP8, activations=Activations.STATIC)
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}


def words(layout=Layout.GPTQ, bits=4, group=128, zeros=Zeros.MIDDLE, **more):
    return PackedForm(layout=layout, bits=bits, group=group, zeros=zeros, **more)


def two_groups(raw, **weights):
    """Another group of other projections, with these settings of its weights."""
    group = raw["config_groups"]["group_0"]
    other = group | {"targets": ["re:.*down_proj"], "weights": group["weights"] | weights}
    return raw | {"config_groups": {"group_0": group | {"targets": ["re:.*self_attn.*"]}, "group_1": other}}


BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


@pytest.mark.parametrize(
    ("raw", "wanted"),
    [
        (compressed(), CheckpointForm(form=FP8)),
        (compressed(strategy="tensor"), CheckpointForm(form=FP8)),
        (compressed(strategy="block", block_structure=[128, 64]), CheckpointForm(form=FP8, block=(128, 64))),
        (compressed("int-quantized", type="int"), CheckpointForm(form=INT8)),
        # GPTQ of llm-compressor writes the order in which it has quantised the inputs. They are where they were.
        (compressed("int-quantized", type="int", actorder="static"), CheckpointForm(form=INT8)),
        (compressed("float-quantized", actorder="weight"), CheckpointForm(form=FP8)),
        (compressed("naive-quantized", ignore=["re:.*lm_head"]), CheckpointForm(form=FP8)),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, CheckpointForm(form=FP8)),
        ({"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}, STATIC),
        (BLOCKS, CheckpointForm(form=FP8, scale="weight_scale_inv", block=(128, 128))),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}, STATIC),
        (compressed("nvfp4-pack-quantized", **NVFP4), words(Layout.NVFP4, group=16)),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, words(Layout.MODELOPT, group=16)),
        (two_groups(packed()), words(Layout.ROWS)),
        (AUTO_ROUND | {"extra_config": {"lm_head": {"bits": 16, "data_type": "fp"}}}, words()),
        (AUTO_ROUND | AUTO_AWQ, words(Layout.AWQ, zeros=Zeros.STORED)),
        (GPTQ | {"dynamic": {"-:.*down.*": {}}}, words()),
        (GPTQ, words()),
        (GPTQ | {"sym": False}, words(zeros=Zeros.LESS_ONE)),
        (GPTQ | GPTQ_2, words(bits=8, group=None, zeros=Zeros.STORED, is_ordered=True)),
        (AWQ | {"version": "GEMM", "modules_to_not_convert": None}, words(Layout.AWQ, zeros=Zeros.STORED)),
        (packed(), words(Layout.ROWS)),
        (packed(strategy="channel", symmetric=False, actorder="weight"), words(Layout.ROWS, 4, None, Zeros.STORED)),
        (packed(actorder="group"), words(Layout.ROWS, is_ordered=True)),
    ],
)  # fmt: skip
def test_these_are_read(raw, wanted):
    assert read_form(raw) == (wanted, [])


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ("fp8", "is not an object"),
        ({}, "quant_method=None is not supported"),
        *(({"quant_method": name}, f"quant_method='{name}' is not supported (only ['compressed-tensors'")
          for name in ("bitsandbytes", "aqlm", "quark", "mxfp4")),
        (compressed("marlin-24", strategy="tensor"), "format='marlin-24'"),
        (packed(type="float"), "weights.type='float'"),
        (packed(group_size=None), "weights.group_size=None is neither -1 nor an integer"),
        (compressed("int-quantized", type="int", actorder="group"), "weights.actorder='group' is not supported (only"),
        (GPTQ | {"group_size": 0}, "group_size=0 is neither -1 nor an integer from 1"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
        (GPTQ | {"sym": "yes"}, "sym='yes' is not supported (only True or False)"),
        (GPTQ | {"dynamic": {"+:.*down": {"bits": 8}}}, "dynamic: projections of different forms"),
        (AWQ | {"version": "gemv"}, "version='gemv' is not supported (only 'gemm' or 'GEMM')"),
        (AWQ | {"zero_point": False}, "zero_point=False"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "; serve its base model with --quantization int4, or"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo='W4A8_AWQ' is not supported (only"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "group_size=32"),
        (compressed("nvfp4-pack-quantized", num_bits=4, group_size=32), "weights.group_size=32"),
        (two_groups(packed(), num_bits=8), "config_groups: projections of different forms"),
        (AUTO_ROUND | {"packing_format": "auto_round:llm_compressor"}, "packing_format='auto_round:llm_compressor'"),
        (AUTO_ROUND | {"extra_config": {"model.layers.0.mlp.down_proj": {"bits": 8}}}, "extra_config"),
        (compressed("int-quantized", type="int", symmetric=False), "zero points"),
        (compressed() | {"config_groups": {}}, "config_groups must be an object with groups"),
        (compressed() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights"),
        (compressed(strategy="block", block_structure=[1, 1 << 40]), "is not two integers"),
    ],
)  # fmt: skip
def test_others_are_refused_in_words(raw, said):
    form, problems = read_form(raw)
    assert form is None
    assert len(problems) == 1
    assert problems[0].startswith("quantization_config")
    assert said in problems[0]


HOSTS = [AUTO_ROUND, compressed(strategy="block", block_structure=[8, 8]), BLOCKS, GPTQ, AWQ, packed(actorder="group")]


@settings(max_examples=examples(150))
@given(data=st.data(), raw=st.sampled_from(HOSTS))
def test_whatever_stands_there_is_read_or_refused(data, raw):
    raw = copy.deepcopy(raw)
    container, key = data.draw(st.sampled_from(places(raw)))
    container[key] = data.draw(HOSTILE)
    form, problems = read_form(raw)
    assert (form is None) == bool(problems)
