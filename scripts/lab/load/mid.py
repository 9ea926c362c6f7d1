"""A model between the demo and a real one, for benches on a CPU: 107 M parameters, to be served with random weights."""

from __future__ import annotations

import json
from pathlib import Path

from model.config import LlamaConfig
from scripts.building.stand_in_tokenizer import write_stand_in_tokenizer

MID = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32_000, "hidden_size": 768,
    "intermediate_size": 2304, "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 4,
    "head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "max_position_embeddings": 2048,
    "tie_word_embeddings": True, "torch_dtype": "float32", "bos_token_id": 31_744, "eos_token_id": 31_745,
}  # fmt: skip


def write_mid(folder: Path) -> LlamaConfig:
    """Writes the model without its weights."""
    config = LlamaConfig.from_hf(MID)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MID))
    write_stand_in_tokenizer(folder, config.vocab_size)
    return config
