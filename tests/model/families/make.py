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
RAW: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 192,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 3,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
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
        ids = torch.from_numpy(llama.prompt(RAW, seed))[None]
        with torch.no_grad():
            gaps = []
            for _ in range(NEW_TOKENS):
                logits = model(ids, use_cache=False).logits[0]
                top = logits[-1].topk(2)
                gaps.append(float(top.values[0] - top.values[1]))
                ids = torch.cat([ids, top.indices[:1][None]], dim=1)
        new = ids[0, llama.PROMPT_LENGTH :].numpy().astype(np.int32)
        if min(gaps) >= llama.MIN_GAP and len(set(new.tolist())) >= NEW_TOKENS // 2 and RAW["eos_token_id"] not in new:
            np.savez_compressed(FILE, logits=logits[: llama.PROMPT_LENGTH].numpy(), tokens=new, seed=np.int32(seed))
            print(f"seed {seed}, gap {min(gaps):.4f}, {len(set(new.tolist()))} distinct tokens")
            return
    raise RuntimeError("no seed gives a text without near-ties")


if __name__ == "__main__":
    main()
