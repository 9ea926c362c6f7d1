"""Writes eagle.npz and eagle3.bin next to this file: what the code of EAGLE's authors computes for small random heads,
and one of these as torch.save stores it.

Not part of the product and not run by the tests: needs torch and transformers in an environment of its own, and the
repository SafeAILab/EAGLE (the golden is from its commit cb7e084):

    python3.11 -m venv ~/torch && ~/torch/bin/pip install torch transformers
    ~/torch/bin/python -m tests.model.goldens.make_eagle ~/EAGLE

Weights and inputs are not stored. They are drawn from numpy by name, here and in the tests.
"""

from __future__ import annotations

import sys
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.model.goldens import make

FOLDER = make.FOLDER
LENGTH = 24  # positions whose features are the model's
CHAIN = 4  # tokens after them, which the head drafts from its own features
VOCAB, MODEL_WIDTH = 192, 64

_BASE: dict[str, Any] = make.BASE | {
    "intermediate_size": 112,
    "num_hidden_layers": 1,
    "rope_theta": 500000.0,
    "pretraining_tp": 1,
    "torch_dtype": "float16",
    "bias": False,
    "pad_token_id": 0,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "eagle": {},
    "eagle_mha": {"num_key_value_heads": 4, "rope_theta": 10000.0, "rms_norm_eps": 0.02},
    "eagle3": {"draft_vocab_size": 80},
    "eagle3_all_tokens": {"draft_vocab_size": VOCAB, "num_key_value_heads": 1, "rms_norm_eps": 0.02},
    "eagle3_narrow": {"draft_vocab_size": 64, "hidden_size": 48, "target_hidden_size": MODEL_WIDTH},
}


def config(variant: str) -> dict[str, Any]:
    """The variant's config.json."""
    return _BASE | VARIANTS[variant]


def is_third(variant: str) -> bool:
    return variant.startswith("eagle3")


def shapes(variant: str) -> dict[str, tuple[int, ...]]:
    """The tensors under the names of the public checkpoints, without the tables of a draft vocabulary."""
    raw = config(variant)
    embed, mlp, head_dim = raw["hidden_size"], raw["intermediate_size"], raw["hidden_size"] // 4
    queries, keys = 4 * head_dim, raw["num_key_value_heads"] * head_dim
    third = is_third(variant)
    inputs, layer = (1 + third) * embed, "midlayer." if third else "layers.0."
    out: dict[str, tuple[int, ...]] = {
        "fc.weight": (embed, 3 * MODEL_WIDTH if third else 2 * embed),
        layer + "self_attn.q_proj.weight": (queries, inputs),
        layer + "self_attn.k_proj.weight": (keys, inputs),
        layer + "self_attn.v_proj.weight": (keys, inputs),
        layer + "self_attn.o_proj.weight": (embed, queries),
        layer + "mlp.gate_proj.weight": (mlp, embed),
        layer + "mlp.up_proj.weight": (mlp, embed),
        layer + "mlp.down_proj.weight": (embed, mlp),
        layer + "post_attention_layernorm.weight": (embed,),
        "embed_tokens.weight": (VOCAB, embed),
    }
    if third:
        out |= dict.fromkeys((layer + "input_layernorm.weight", layer + "hidden_norm.weight", "norm.weight"), (embed,))
        out["lm_head.weight"] = (raw["draft_vocab_size"], embed)
    return out


def drawn(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """f32 values that float16 holds exactly."""
    draw = np.random.default_rng([16, zlib.crc32(name.encode())]).standard_normal(shape, np.float32)
    value = 1 + draw / 4 if len(shape) == 1 else draw * np.float32(shape[-1] ** -0.5)
    return value.astype(np.float16).astype(np.float32)


def tensors(variant: str) -> dict[str, np.ndarray]:
    """Every tensor of the checkpoint by its name: weights in f32, and the tables if the draft vocabulary is smaller."""
    out = {name: drawn(f"{variant} {name}", shape) for name, shape in shapes(variant).items()}
    count = config(variant).get("draft_vocab_size", VOCAB)
    if count < VOCAB:
        tokens = np.sort(np.random.default_rng(count).permutation(VOCAB)[:count])
        out["d2t"] = (tokens - np.arange(count)).astype(np.int64)
        out["t2d"] = np.isin(np.arange(VOCAB), tokens)
    return out


def tokens(variant: str) -> np.ndarray:
    """i64[LENGTH + 1]: the text. Its first token is the one before those that the head reads."""
    return np.random.default_rng(zlib.crc32(variant.encode())).integers(0, VOCAB, LENGTH + 1)


def hidden_states(variant: str) -> np.ndarray:
    """f32[LENGTH, n * MODEL_WIDTH]: of the model, three layers' next to each other for EAGLE-3."""
    return drawn(f"{variant} hidden", (LENGTH, (3 if is_third(variant) else 1) * MODEL_WIDTH)) * 5


def model_head() -> np.ndarray:
    """f32[VOCAB, MODEL_WIDTH]: of the model, which a head of the first generation shares."""
    return drawn("the model's head", (VOCAB, MODEL_WIDTH))


def _golden(variant: str) -> dict[str, np.ndarray]:
    import torch
    from eagle.model import cnets, cnets1

    raw = SimpleNamespace(**config(variant))  # today's transformers would fill in a rope_scaling
    model = (cnets if is_third(variant) else cnets1).Model(raw, bias=False).eval().float()
    state = {name: torch.from_numpy(value) for name, value in tensors(variant).items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"d2t", "t2d"}, (missing, unexpected)
    shared = torch.from_numpy(model_head())

    def logits(features: Any) -> Any:
        return model.lm_head(model.norm(features)) if is_third(variant) else features @ shared.T

    drafts: list[int] = []
    with torch.no_grad():
        read = torch.from_numpy(tokens(variant)[None, 1:])
        states = torch.from_numpy(hidden_states(variant)[None])
        out, kv = model(states, input_ids=read, use_cache=True)
        first_features, first_logits, chain = out[0].numpy(), logits(out[0]).numpy(), []
        for i in range(CHAIN):
            last = logits(out[:, -1])[0]
            chain.append(last.numpy())
            draft = int(last.argmax())
            drafts.append(draft + int(model.d2t[draft]) if is_third(variant) else draft)
            at = torch.tensor([[LENGTH + i]])
            out, kv = model(
                out[:, -1:], torch.tensor([[drafts[-1]]]), past_key_values=kv, position_ids=at, use_cache=True
            )
    return {
        f"{variant}.features": first_features,
        f"{variant}.logits": first_logits,
        f"{variant}.chain": np.stack(chain),
        f"{variant}.drafts": np.array(drafts, np.int32),
    }


def _save_state_dict(path: Path) -> None:
    """The head `eagle3` as its authors publish one: in float16, and without the model's embedding."""
    import torch

    stored = {
        name: torch.from_numpy(value) for name, value in tensors("eagle3").items() if name != "embed_tokens.weight"
    }
    torch.save({name: x.half() if x.is_floating_point() else x for name, x in stored.items()}, path)


def main() -> None:
    sys.path.insert(0, sys.argv[1])
    arrays: dict[str, np.ndarray] = {}
    for variant in VARIANTS:
        arrays |= _golden(variant)
        print(variant, arrays[f"{variant}.drafts"], "logits std", arrays[f"{variant}.logits"].std().round(2))
    np.savez_compressed(FOLDER / "eagle.npz", **arrays)
    _save_state_dict(FOLDER / "eagle3.bin")


if __name__ == "__main__":
    main()
