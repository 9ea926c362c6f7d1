"""The published Llama 3 models by name: their constants without their weights, for sizing and for dummy runs.

Source: the `config.json` of each model's instruct checkpoint in Meta's repositories.
"""

from __future__ import annotations

import json
from pathlib import Path

from model.config import Llama3Scaling, LlamaConfig

PREFIX = "preset:"


def _llama3_scaling(factor: float) -> Llama3Scaling:
    return Llama3Scaling(
        factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )


def _llama(
    *,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int,
    head_dim: int = 128,
    rope_factor: float | None,
    max_position_embeddings: int = 131072,
    tie_word_embeddings: bool = False,
) -> LlamaConfig:
    """A config with the constants that the whole family shares."""
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=8,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=None if rope_factor is None else _llama3_scaling(rope_factor),
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=tie_word_embeddings,
        checkpoint_dtype="bfloat16",
        bos_token_id=128000,
        eos_token_ids=(128001, 128008, 128009),  # end of text, of message, of turn
    )


_SIZES = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
PRESETS: dict[str, LlamaConfig] = {name: _llama(**sizes) for name, sizes in _SIZES.items()}


def preset(name: str) -> LlamaConfig:
    """The preset called `name`, without the prefix. ValueError for an unknown one."""
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]
