"""Writes the files next to this one: what transformers computes for small random Llamas of every variant we support.

Not part of the product and not run by the tests: needs torch and transformers in an environment of its own:

    python3.11 -m venv ~/torch && ~/torch/bin/pip install torch transformers
    ~/torch/bin/python -m tests.model.goldens.make

Weights are not stored. They are drawn from numpy by name, here and in the tests (`tensors`), so both sides hold the
same values; a seed is tried until no greedy choice is a near-tie and the text does not collapse into one token.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent
PROMPT_LENGTH = 32
NEW_TOKENS = 64
MIN_GAP = 1e-3  # between the two greatest logits of every greedy choice
MIN_DISTINCT = 24  # different tokens among the new ones

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 192,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# An original context of 32 tokens, so that the scaling bites within the 96 tokens that are compared.
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "mha": {"num_key_value_heads": 4},
    "mha_by_absence": {"num_key_value_heads": None, "hidden_size": 48},
    "gqa2": {},
    "gqa4": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16},
    "mqa": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "llama3_rope": {"rope_theta": 500000.0, "rope_scaling": _LLAMA3, "head_dim": 32},
    "llama3_rope_tied_bf16": {
        "rope_theta": 500000.0,
        "rope_scaling": _LLAMA3 | {"factor": 32.0},
        "tie_word_embeddings": True,
        "head_dim": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "torch_dtype": "bfloat16",
    },
    "linear_rope": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "theta": {"rope_theta": 250.0},
    "head_dim_128": {"head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2},
    "wide_heads": {"head_dim": 40},
    "narrow_heads": {"head_dim": 8, "num_attention_heads": 4, "num_key_value_heads": 1},
    "eps": {"rms_norm_eps": 0.03},
    "bf16": {"torch_dtype": "bfloat16"},
}
# Published rotary constants, compared frequency by frequency: (head_dim, config fields).
ROTARY = {
    "llama-3": (128, {"rope_theta": 500000.0}),
    "llama-3.1": (
        128,
        {
            "rope_theta": 500000.0,
            "rope_scaling": _LLAMA3 | {"original_max_position_embeddings": 8192},
        },
    ),
    "llama-3.2-1b": (
        64,
        {
            "rope_theta": 500000.0,
            "rope_scaling": _LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 8192},
        },
    ),
    "linear": (64, {"rope_theta": 10000.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
}


def config(variant: str) -> dict[str, Any]:
    """The variant's config.json, in the older spelling; an absent key is one that is None here."""
    merged = BASE | VARIANTS[variant]
    return {key: value for key, value in merged.items() if value is not None}


def shapes(raw: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    embed, mlp, vocab = raw["hidden_size"], raw["intermediate_size"], raw["vocab_size"]
    heads = raw["num_attention_heads"]
    head_dim = raw.get("head_dim") or embed // heads
    queries, keys = heads * head_dim, (raw.get("num_key_value_heads") or heads) * head_dim
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, embed), "model.norm.weight": (embed,)}
    if not raw["tie_word_embeddings"]:
        out["lm_head.weight"] = (vocab, embed)
    for i in range(raw["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        out[layer + "input_layernorm.weight"] = out[layer + "post_attention_layernorm.weight"] = (embed,)
        out[layer + "self_attn.q_proj.weight"] = (queries, embed)
        out[layer + "self_attn.k_proj.weight"] = out[layer + "self_attn.v_proj.weight"] = (keys, embed)
        out[layer + "self_attn.o_proj.weight"] = (embed, queries)
        out[layer + "mlp.gate_proj.weight"] = out[layer + "mlp.up_proj.weight"] = (mlp, embed)
        out[layer + "mlp.down_proj.weight"] = (embed, mlp)
    return out


def tensors(raw: Mapping[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Every tensor by its checkpoint name, f32; bfloat16 variants hold values that bfloat16 holds exactly."""
    return values(shapes(raw), seed, is_bfloat16=raw["torch_dtype"] == "bfloat16")


def values(shapes: Mapping[str, tuple[int, ...]], seed: int, *, is_bfloat16: bool) -> dict[str, np.ndarray]:
    """Random tensors of these names and shapes."""
    out = {}
    for name, shape in shapes.items():
        draw = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(shape, np.float32)
        if len(shape) == 1:
            value = 1 + draw / 4
        else:
            value = draw * np.float32(shape[1] ** -0.5 * (1.5 if "attn" in name else 1.0))
        if is_bfloat16:
            value = (value.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        out[name] = value.astype(np.float32)
    return out


def prompt(raw: Mapping[str, Any], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, raw["vocab_size"], PROMPT_LENGTH)


def greedy(model: Any, prompt: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The logits before the last token, and at most `count` new tokens: none from the first near-tie on."""
    import torch

    ids = torch.from_numpy(prompt)[None]
    with torch.no_grad():
        for _ in range(count):
            logits = model(ids, use_cache=False).logits[0]
            top = logits[-1].topk(2)
            if float(top.values[0] - top.values[1]) < MIN_GAP:
                break
            ids = torch.cat([ids, top.indices[:1][None]], dim=1)
    return logits.numpy(), ids[0, len(prompt) :].numpy().astype(np.int32)


def _golden(variant: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    raw = config(variant)
    hf_config = LlamaConfig(**raw, attn_implementation="eager")
    hf_config.dtype = torch.float32  # computed in float32, whatever the file's type
    for seed in range(200):
        model = LlamaForCausalLM(hf_config).eval()
        state = {name: torch.from_numpy(value) for name, value in tensors(raw, seed).items()}
        missing, unexpected = model.load_state_dict(state, strict=False)
        model.tie_weights()
        assert not unexpected and set(missing) <= {"lm_head.weight"} and (not missing or raw["tie_word_embeddings"])
        logits, new = greedy(model, prompt(raw, seed), NEW_TOKENS)
        if len(new) < NEW_TOKENS or len(set(new.tolist())) < MIN_DISTINCT:
            continue
        written = json.loads(model.config.to_json_string())
        written["dtype"] = raw["torch_dtype"]
        print(f"{variant}: seed {seed}, {len(set(new.tolist()))} distinct tokens, logits std {float(logits.std()):.2f}")
        arrays = {
            f"{variant}.logits": logits[:PROMPT_LENGTH],
            f"{variant}.tokens": new,
            f"{variant}.seed": np.int32(seed),
        }
        return arrays, written
    raise RuntimeError(f"no seed gives {variant} a text without near-ties")


def _rotary(head_dim: int, fields: Mapping[str, Any]) -> np.ndarray:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    hf_config = LlamaConfig(hidden_size=4 * head_dim, num_attention_heads=4, max_position_embeddings=131072, **fields)
    return LlamaRotaryEmbedding(hf_config).inv_freq.numpy()


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, np.ndarray] = {}
    configs = {}
    for variant in VARIANTS:
        golden, configs[variant] = _golden(variant)
        arrays |= golden
    arrays |= {f"rotary.{name}": _rotary(*arguments) for name, arguments in ROTARY.items()}
    np.savez_compressed(FOLDER / "llama.npz", **arrays)
    (FOLDER / "configs.json").write_text(json.dumps(configs, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
