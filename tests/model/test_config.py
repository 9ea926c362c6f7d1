from __future__ import annotations

import itertools
import json
import logging
import math
import re
from pathlib import Path
from typing import Any

import pytest
import transformers

from model.config import LinearScaling, Llama3Scaling, LlamaConfig
from tests.model import checkpoints
from tests.model.goldens.make import VARIANTS, config
from tests.model.network.test_llama import TINY

LLAMA_3_2_1B = json.loads(Path(__file__).with_name("llama_3_2_1b.json").read_text())  # as published


def test_a_published_config_is_read_whole():
    parsed = LlamaConfig.from_hf(LLAMA_3_2_1B)
    assert parsed == LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=Llama3Scaling(
            factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
        ),
        max_position_embeddings=131072,
        tie_word_embeddings=True,
        checkpoint_dtype="bfloat16",
        bos_token_id=128000,
        eos_token_ids=(128001, 128008, 128009),
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_both_spellings_mean_the_same(variant):
    """The older one is ours, the newer one was written by transformers 5."""
    newer = checkpoints.configs_as_written()[variant]
    assert "rope_parameters" in newer
    assert "torch_dtype" not in newer
    assert LlamaConfig.from_hf(newer) == LlamaConfig.from_hf(config(variant))


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_written_is_read_back(variant):
    parsed = LlamaConfig.from_hf(config(variant))
    assert LlamaConfig.from_hf(json.loads(json.dumps(parsed.to_hf()))) == parsed


def test_defaults_are_the_reference_implementations():
    raw = LLAMA_3_2_1B | {"head_dim": None, "num_key_value_heads": None, "rope_scaling": None, "rope_theta": None}
    del raw["tie_word_embeddings"]
    parsed = LlamaConfig.from_hf(raw)
    assert (parsed.head_dim, parsed.num_kv_heads, parsed.rope_theta) == (64, 32, 10000.0)
    assert parsed.rope_scaling is None
    assert parsed.tie_word_embeddings is False


def test_a_scaling_may_be_called_type():
    parsed = LlamaConfig.from_hf(LLAMA_3_2_1B | {"rope_scaling": {"type": "linear", "factor": 2}})
    assert parsed.rope_scaling == LinearScaling(factor=2.0)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "architectures=['MistralForCausalLM'] is not supported"),
        ({"model_type": "mistral"}, "model_type='mistral' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"pretraining_tp": 2}, "pretraining_tp=2 is not supported"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "quantization_config.quant_method='aqlm' is not supported"),
        ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype='float8_e4m3fn' is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type='yarn' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "rope_type='llama3' lacks ['low_freq_factor'"),
        ({"rope_parameters": {"rope_theta": 1.0}}, "rope_theta must be one number, and is given as [500000.0, 1.0]"),
        ({"rope_scaling": ["linear"]}, "rope_parameters and rope_scaling must be objects"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling.factor=0 is not a number from 1e-06"),
        ({"rope_scaling": LLAMA_3_2_1B["rope_scaling"] | {"high_freq_factor": 1}}, "low_freq_factor below high"),
        ({"vocab_size": "128256"}, "vocab_size='128256' is not an integer"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes' is not true or false"),
        ({"eos_token_id": ["</s>"]}, "eos_token_id=['</s>'] is not an integer or a list of integers"),
        ({"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rms_norm_eps": None}, "rms_norm_eps is missing"),
        ({"num_key_value_heads": 5}, "num_heads=32 is not a multiple of num_kv_heads=5"),
        ({"head_dim": 63}, "head_dim=63 is odd"),
        ({"rms_norm_eps": math.inf}, "rms_norm_eps=inf is not a number above 0 and below 1"),
        ({"rope_theta": math.inf}, "rope_theta=inf is not a number from"),
        ({"rope_scaling": {"rope_type": []}}, "rope_scaling.rope_type=[] is not a text"),
        ({"rope_scaling": {"type": "linear", "factor": math.inf}}, "rope_scaling.factor=inf is not a number from"),
        ({"eos_token_id": [128001, 128256]}, "eos_token_id=[128256] is not in the vocabulary of 128256 ids"),
        ({"vocab_size": 10**18}, "vocab_size=1000000000000000000 is not an integer from 1 to 16777216"),
        ({"model_type": ["llama"] * 10_000}, "model_type=['llama', "),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(change, complaint):
    with pytest.raises(ValueError, match=re.escape(complaint)):
        LlamaConfig.from_hf(LLAMA_3_2_1B | change)


_LLAMA3 = LLAMA_3_2_1B["rope_scaling"]
_SPELLINGS = [
    None,
    {},
    {"rope_theta": 7e4},
    {"factor": 2.0},
    {"rope_type": "default"},
    {"type": "linear", "factor": 2.0},
    {"rope_type": "linear", "factor": 2.0, "rope_theta": 7e4},
    {"rope_type": "linear", "type": "default", "factor": 2.0},
    {"rope_type": "default", "type": "linear", "factor": 2.0},
    {"rope_type": "", "type": "linear", "factor": 2.0},
    _LLAMA3,
    _LLAMA3 | {"rope_theta": 5e5, "original_max_position_embeddings": 4096},
    {name: value for name, value in _LLAMA3.items() if name != "original_max_position_embeddings"},
]


def rope_of(config: LlamaConfig) -> tuple[float, dict[str, Any]]:
    """The base, and the scaling in transformers' words."""
    names = {type(None): "default", LinearScaling: "linear", Llama3Scaling: "llama3"}
    scaling = config.rope_scaling
    return config.rope_theta, {"rope_type": names[type(scaling)], **({} if scaling is None else vars(scaling))}


@pytest.mark.parametrize("rope_theta", [{}, {"rope_theta": 7e4}, {"rope_theta": 5e5}], ids=str)
def test_every_spelling_of_rotary_embeddings_is_refused_or_means_what_transformers_reads(rope_theta, caplog):
    """Among them files with both spellings, of which transformers ignores one."""
    caplog.set_level(logging.CRITICAL, logger="transformers")  # it warns of fields that a kind does not have
    rest = {name: value for name, value in LLAMA_3_2_1B.items() if name not in ("rope_theta", "rope_scaling")}
    num_read = 0
    for old, new in itertools.product(_SPELLINGS, _SPELLINGS):
        raw = rest | rope_theta | {"rope_scaling": old, "rope_parameters": new}
        try:
            theta, scaling = rope_of(LlamaConfig.from_hf(raw))
        except ValueError:
            continue
        num_read += 1
        reference = transformers.LlamaConfig.from_dict(json.loads(json.dumps(raw)))
        assert reference.rope_parameters["rope_theta"] == theta, raw
        assert scaling.items() <= reference.rope_parameters.items(), raw
    assert num_read >= 40


def test_what_transformers_takes_for_nothing_is_nothing():
    """`rope_scaling: false`, and numbers out of every range in fields that nobody reads."""
    raw = LLAMA_3_2_1B | {"rope_scaling": False, "initializer_range": math.inf, "pad_token_id": -1}
    assert LlamaConfig.from_hf(raw).rope_scaling is None


def test_a_context_of_ten_million_tokens_is_read():
    assert LlamaConfig.from_hf(LLAMA_3_2_1B | {"max_position_embeddings": 10_485_760})


def test_all_problems_are_named_at_once(tmp_path):
    raw = LLAMA_3_2_1B | {"hidden_act": "relu", "mlp_bias": True, "rope_scaling": {"rope_type": "longrope"}}
    del raw["vocab_size"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="4 problem") as error:
        LlamaConfig.from_file(tmp_path)
    for name in (str(tmp_path / "config.json"), "hidden_act", "mlp_bias", "longrope", "vocab_size is missing"):
        assert name in str(error.value)


def test_keys_that_the_architecture_does_not_read_are_ignored():
    assert LlamaConfig.from_hf(LLAMA_3_2_1B | {"unsloth_fixed": True}) == LlamaConfig.from_hf(LLAMA_3_2_1B)


def test_zero_and_negative_sizes_are_all_named():
    with pytest.raises(ValueError, match=r"vocab_size=0 .*; hidden_size=-1 "):
        LlamaConfig(**{**vars(TINY), "vocab_size": 0, "hidden_size": -1})
