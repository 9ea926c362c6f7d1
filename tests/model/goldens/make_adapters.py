"""Writes `adapters/` and `adapters.npz` next to this file: LoRA adapters of many kinds for the variant gqa2 of `make`,
as the package peft stores them, and what it computes with each in float32.

Not part of the product and not run by the tests: needs torch, transformers and peft (the goldens are from 0.21.2) in an
environment of its own:

    python3.11 -m venv ~/torch && ~/torch/bin/pip install torch transformers peft
    ~/torch/bin/python -m tests.model.goldens.make_adapters

The values are drawn from numpy by name; a seed is tried until no greedy choice is a near-tie.

`adapter.gguf` is what llama.cpp's converter makes of `adapters/torch_file`. The base is the variant's folder:

    python convert_lora_to_gguf.py --base GQA2 --outfile adapter.gguf adapters/torch_file
"""

from __future__ import annotations

import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from tests.model.goldens import make

ARRAYS, FOLDERS, GGUF = (make.FOLDER / name for name in ("adapters.npz", "adapters", "adapter.gguf"))
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


def drawn(name: str, seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """f32 values that bfloat16 and float16 hold exactly."""
    draw = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(shape, np.float32)
    return np.round(draw * np.float32(shape[1] ** -0.5) * 64) / 64


def _base() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    raw = make.config(BASE)
    model = LlamaForCausalLM(LlamaConfig(**raw, attn_implementation="eager")).eval()
    with np.load(make.FOLDER / "llama.npz") as file:
        seed = int(file[f"{BASE}.seed"])
    model.load_state_dict({name: torch.from_numpy(value) for name, value in make.tensors(raw, seed).items()})
    return model, make.prompt(raw, seed)[:PROMPT_LENGTH]


def _golden(name: str, folder: Path) -> dict[str, np.ndarray]:
    import torch
    from peft import LoraConfig, get_peft_model

    fields = dict(ADAPTERS[name])
    dtype, file = fields.pop("dtype", "float32"), fields.pop("file", "adapter_model.safetensors")
    for seed in range(200):
        base, prompt = _base()
        model = get_peft_model(base, LoraConfig(**fields, task_type="CAUSAL_LM")).eval()
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                parameter.data = torch.from_numpy(drawn(f"{name} {key}", seed, tuple(parameter.shape)))
        ids = torch.from_numpy(prompt)[None]
        with torch.no_grad():
            for _ in range(NEW_TOKENS):
                logits = model(ids, use_cache=False).logits[0]
                top = logits[-1].topk(2)
                gap = float(top.values[0] - top.values[1])
                if gap < make.MIN_GAP:
                    break
                ids = torch.cat([ids, top.indices[:1][None]], dim=1)
            with model.disable_adapter():
                effect = float((model(ids, use_cache=False).logits[0][: len(logits)] - logits).abs().max())
        if ids.shape[1] == PROMPT_LENGTH + NEW_TOKENS and (effect > 0.5 or name == "alpha_zero"):
            break
    else:
        raise RuntimeError(f"no seed gives {name} a text without near-ties")
    model.to(getattr(torch, dtype)).save_pretrained(folder, safe_serialization=file.endswith(".safetensors"))
    assert (folder / file).exists()
    (folder / "README.md").unlink()
    print(f"{name}: seed {seed}, the logits differ from the base's by up to {effect:.2f}")
    return {f"{name}.logits": logits[:PROMPT_LENGTH].numpy(), f"{name}.tokens": ids[0, PROMPT_LENGTH:].numpy()}


def main() -> None:
    """The command."""
    shutil.rmtree(FOLDERS, ignore_errors=True)
    arrays: dict[str, np.ndarray] = {}
    for name in ADAPTERS:
        arrays |= _golden(name, FOLDERS / name)
    np.savez_compressed(ARRAYS, **arrays)


if __name__ == "__main__":
    main()
