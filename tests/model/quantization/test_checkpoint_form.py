"""`quantization_config` as the public writers spell it."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.config import projections
from model.quantization.checkpoint_form import CheckpointForm, read_form
from model.quantization.forms import EightBit
from tests.scripts.test_checkpoint_fuzz import HOSTILE, places

MODULES = projections(2)


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


INT8, FP8 = EightBit.INT8, EightBit.FP8
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "ignored_layers": ["lm_head"]}


@pytest.mark.parametrize(
    ("raw", "wanted"),
    [
        (compressed(), CheckpointForm(form=FP8)),
        (compressed(strategy="tensor"), CheckpointForm(form=FP8)),
        (compressed(strategy="block", block_structure=[128, 64]), CheckpointForm(form=FP8, block=(128, 64))),
        (compressed("int-quantized", type="int"), CheckpointForm(form=INT8)),
        (compressed("naive-quantized", ignore=["re:.*lm_head"]), CheckpointForm(form=FP8)),
        (
            {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
            CheckpointForm(form=FP8),
        ),
        (
            {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
            CheckpointForm(form=FP8),
        ),
        (
            BLOCKS | {"activation_scheme": "dynamic"},
            CheckpointForm(form=FP8, scale="weight_scale_inv", block=(128, 128)),
        ),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}, CheckpointForm(form=FP8)),
    ],
)
def test_these_are_read(raw, wanted):
    assert read_form(raw, MODULES) == (wanted, [])


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ("fp8", "is not an object"),
        ({}, "quant_method=None is not supported"),
        *(({"quant_method": name}, f"quant_method='{name}' is not supported (only ['compressed-tensors'")
          for name in ("bitsandbytes", "aqlm", "gptq", "awq", "mxfp4")),
        (compressed("pack-quantized", strategy="tensor"), "format='pack-quantized'"),
        (compressed(num_bits=4), "weights must be of 8 bits"),
        (compressed("int-quantized", type="int", symmetric=False), "zero points"),
        (compressed(strategy="group"), "strategy='group'"),
        (compressed(strategy="block", block_structure=[0, 1]), "block_structure=[0, 1] is not two integers"),
        (compressed() | {"config_groups": {}}, "config_groups must be one group"),
        (compressed() | {"config_groups": {"a": {"targets": ["Linear"]}}}, "config_groups must quantise the weights"),
        (compressed() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights"),
        (compressed(ignore=["model.layers.1.mlp.down_proj"]), "leaves out 1 projections (model.layers.1.mlp.down_proj"),
        (compressed(ignore=["re:.*self_attn.*"]), "leaves out 8 projections"),
        (compressed(ignore=[r"re:.*\.mlp\.up_proj$"]), "leaves out 2 projections"),
        (compressed(ignore=["re:("]), "ignore holds a pattern that is not read: 're:('"),
        (compressed(ignore=["re:(a+)+$"]), "not read"),
        (compressed(ignore=["re:" + 4 * ".*"]), "not read"),
        (compressed(strategy="block", block_structure=[1, 1 << 40]), "is not two integers"),
        (compressed() | {"ignore": "lm_head"}, "is not a list of names"),
        ({"quant_method": "fp8", "modules_to_not_convert": ["model.layers.0"]}, "leaves out 7 projections"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt='e5m2'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo='NVFP4'"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["*self_attn*"]}, "leaves out 8"),
    ],
)  # fmt: skip
def test_others_are_refused_in_words(raw, words):
    form, problems = read_form(raw, MODULES)
    assert form is None
    assert len(problems) == 1
    assert problems[0].startswith("quantization_config")
    assert words in problems[0]


@settings(max_examples=150, deadline=None)
@given(data=st.data(), raw=st.sampled_from([compressed(strategy="block", block_structure=[8, 8]), BLOCKS]))
def test_whatever_stands_there_is_read_or_refused(data, raw):
    raw = copy.deepcopy(raw)
    container, key = data.draw(st.sampled_from(places(raw)))
    container[key] = data.draw(HOSTILE)
    form, problems = read_form(raw, MODULES)
    assert (form is None) == bool(problems)
