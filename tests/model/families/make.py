"""Writes qwen3.npz: the logits and the greedy text of transformers' Qwen3 with small random weights.

Not run by the tests. It needs torch and transformers, as tests/model/goldens/make.py does:

    ~/torch/bin/python -m tests.model.families.make
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.model.goldens import make as llama

FILE = Path(__file__).with_name("qwen3.npz")
NEW_TOKENS = 24
RAW: dict[str, Any] = llama.BASE | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 3,
}


def shapes() -> dict[str, tuple[int, ...]]:
    norms = [f"model.layers.{layer}.self_attn.{x}_norm.weight" for layer in range(3) for x in "qk"]
    return llama.shapes(RAW) | dict.fromkeys(norms, (RAW["head_dim"],))


def tensors(seed: int) -> dict[str, np.ndarray]:
    """Every tensor by its checkpoint name, f32."""
    return llama.values(shapes(), seed, is_bfloat16=False)


def main() -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**RAW, attn_implementation="eager")
    config.dtype = torch.float32
    for seed in range(200):
        model = Qwen3ForCausalLM(config).eval()
        model.load_state_dict({name: torch.from_numpy(value) for name, value in tensors(seed).items()})
        logits, new = llama.greedy(model, llama.prompt(RAW, seed), NEW_TOKENS)
        distinct = set(new.tolist())
        if len(new) == NEW_TOKENS and len(distinct) >= NEW_TOKENS // 2 and RAW["eos_token_id"] not in distinct:
            np.savez_compressed(FILE, logits=logits[: llama.PROMPT_LENGTH], tokens=new, seed=np.int32(seed))
            print(f"seed {seed}, {len(distinct)} distinct tokens")
            return
    raise RuntimeError("no seed gives a text without near-ties")


if __name__ == "__main__":
    main()
