"""Writes `adapters/` and `adapters.npz` next to this file: LoRA adapters of many kinds for the variant gqa2 of `make`,
as the package peft stores them, and what it computes with each in float32. `merged/` and `merged.npz` are of those that
are served merged only, some of them for the variant `tied`.

Not part of the product and not run by the tests: needs torch, transformers and peft (the goldens are from 0.21.2) in an
environment of its own:

    python3.11 -m venv ~/torch && ~/torch/bin/pip install torch transformers peft
    ~/torch/bin/python -m tests.model.goldens.make_adapters [MERGED_ONLY]

The values are drawn from numpy by name; a seed is tried until no greedy choice is a near-tie.

`adapter.gguf` is what llama.cpp's converter makes of `adapters/torch_file`. The base is the variant's folder:

    python convert_lora_to_gguf.py --base GQA2 --outfile adapter.gguf adapters/torch_file
"""

from __future__ import annotations

import shutil
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from tests.model.goldens import make

ARRAYS, FOLDERS, GGUF = (make.FOLDER / name for name in ("adapters.npz", "adapters", "adapter.gguf"))
MERGED_ARRAYS, MERGED_FOLDERS = (make.FOLDER / name for name in ("merged.npz", "merged"))
BASE = "gqa2"
PROMPT_LENGTH, NEW_TOKENS = 12, 8

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
# The fields of peft's LoraConfig; "dtype" and "file" are of the stored tensors.
ADAPTERS: dict[str, dict[str, Any]] = {
    "q_and_v": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "all_linear": {"r": 2, "lora_alpha": 3, "target_modules": "all-linear"},
    "rank_pattern": {
        "r": 3,
        "lora_alpha": 6,
        "target_modules": ATTENTION,
        "rank_pattern": {"model.layers.2.self_attn.q_proj": 1, "self_attn.q_proj": 4, r"layers\.[01]\..*o_proj": 2},
    },
    "alpha_pattern": {
        "r": 2,
        "lora_alpha": 2,
        "target_modules": ["gate_proj", "up_proj", "down_proj"],
        "alpha_pattern": {"down_proj": 5, "layers.1.mlp.up_proj": 9, "up_proj": 1},
    },
    "rslora": {
        "r": 3,
        "lora_alpha": 3,
        "use_rslora": True,
        "target_modules": ["o_proj", "up_proj"],
        "rank_pattern": {"up_proj": 2},
    },
    "some_layers": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["k_proj", "down_proj"],
        "layers_to_transform": [0, 2],
        "layers_pattern": "layers",
    },
    "pattern": {
        "r": 2,
        "lora_alpha": 4,
        "target_modules": r".*\.([12])\.(self_attn\.(q|o)|mlp\.gate)_proj",
        "exclude_modules": r".*\.2\.mlp\..*",
    },
    "alpha_zero": {"r": 2, "lora_alpha": 0, "target_modules": ["q_proj"]},
    "torch_file": {"r": 2, "lora_alpha": 4, "target_modules": ATTENTION, "file": "adapter_model.bin"},
    "bfloat16": {"r": 4, "lora_alpha": 8, "target_modules": [*ATTENTION, "up_proj"], "dtype": "bfloat16"},
    "float16": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["v_proj", "gate_proj"],
        "exclude_modules": ["0.self_attn.v_proj"],
        "dtype": "float16",
    },
}
# "base" is the variant, "tokens" the vocabulary to which it is resized.
ENDS = ["embed_tokens", "lm_head"]
MERGED: dict[str, dict[str, Any]] = {
    "ends": {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", *ENDS]},
    "saved": {"r": 2, "lora_alpha": 4, "target_modules": ["v_proj"], "modules_to_save": [*ENDS, "input_layernorm"]},
    "resized": {"r": 2, "lora_alpha": 4, "target_modules": "all-linear", "modules_to_save": ENDS, "tokens": 196},
    "resized_ends": {"r": 2, "lora_alpha": 4, "target_modules": ["o_proj", *ENDS], "tokens": 194},
    "smaller": {"r": 2, "lora_alpha": 4, "target_modules": ["up_proj"], "modules_to_save": ENDS, "tokens": 188},
    "tied_embedding": {"r": 2, "lora_alpha": 4, "target_modules": ["k_proj", "embed_tokens"], "base": "tied"},
    "tied_saved": {"r": 2, "lora_alpha": 4, "target_modules": ["k_proj"], "modules_to_save": ENDS, "base": "tied"},
    "tied_head": {"r": 2, "lora_alpha": 4, "target_modules": ["k_proj", "lm_head"], "base": "tied"},
}


def drawn(name: str, seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """f32 values that bfloat16 and float16 hold exactly."""
    draw = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(shape, np.float32)
    return np.round(draw * np.float32(shape[-1] ** -0.5) * 64) / 64


def _base(variant: str, tokens: int | None) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    raw = make.config(variant)
    model = LlamaForCausalLM(LlamaConfig(**raw, attn_implementation="eager")).eval()
    with np.load(make.FOLDER / "llama.npz") as file:
        seed = int(file[f"{variant}.seed"])
    values = {name: torch.from_numpy(value) for name, value in make.tensors(raw, seed).items()}
    model.load_state_dict(values, strict=not raw["tie_word_embeddings"])
    prompt = make.prompt(raw, seed)[:PROMPT_LENGTH]
    if tokens is not None:
        model.resize_token_embeddings(tokens, mean_resizing=False)
        prompt %= tokens
        prompt[-3:] = [tokens - 1, 5, tokens - 2]
    model.tie_weights()
    return model, prompt


def _golden(name: str, folder: Path) -> dict[str, np.ndarray]:
    import torch
    from peft import LoraConfig, get_peft_model

    fields = dict((ADAPTERS | MERGED)[name])
    base_of = fields.pop("base", BASE), fields.pop("tokens", None)
    dtype, file = fields.pop("dtype", "float32"), fields.pop("file", "adapter_model.safetensors")
    for seed in range(200):
        base, prompt = _base(*base_of)
        model = get_peft_model(base, LoraConfig(**fields, task_type="CAUSAL_LM")).eval()
        for key, parameter in model.named_parameters():
            if "lora_" in key or ".modules_to_save." in key:
                parameter.data = torch.from_numpy(drawn(f"{name} {key}", seed, tuple(parameter.shape)))
        logits, new = make.greedy(model, prompt, NEW_TOKENS)
        ids = torch.from_numpy(np.concatenate([prompt, new]))[None]
        with torch.no_grad(), model.disable_adapter():
            effect = np.abs(model(ids, use_cache=False).logits[0][: len(logits)].numpy() - logits).max()
        if len(new) == NEW_TOKENS and (effect > 0.5 or name == "alpha_zero"):
            break
    else:
        raise RuntimeError(f"no seed gives {name} a text without near-ties")
    model.to(getattr(torch, dtype)).save_pretrained(folder, safe_serialization=file.endswith(".safetensors"))
    assert (folder / file).exists()
    (folder / "README.md").unlink()
    print(f"{name}: seed {seed}, the logits differ from the base's by up to {effect:.2f}")
    found = {f"{name}.logits": logits[:PROMPT_LENGTH], f"{name}.tokens": new}
    return found | ({f"{name}.prompt": prompt} if name in MERGED else {})


def main() -> None:
    """The command."""
    kinds = [(MERGED, MERGED_FOLDERS, MERGED_ARRAYS), (ADAPTERS, FOLDERS, ARRAYS)]
    for names, folders, file in kinds[: 1 if sys.argv[1:] else 2]:
        shutil.rmtree(folders, ignore_errors=True)
        arrays: dict[str, np.ndarray] = {}
        for name in names:
            arrays |= _golden(name, folders / name)
        np.savez_compressed(file, **arrays)


if __name__ == "__main__":
    main()
