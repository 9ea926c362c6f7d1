"""The published Llama 3 models by name: their constants without their weights, for sizing and for dummy runs.

Source: the `config.json` of each model's instruct checkpoint in Meta's repositories.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from model.config import Llama3Scaling, LlamaConfig

PREFIX = "preset:"


_DEFAULTS: dict[str, Any] = {"head_dim": 128, "max_position_embeddings": 131072, "tie_word_embeddings": False}


def _llama(*, rope_factor: float | None, **sizes: Any) -> LlamaConfig:
    """A config with the constants that the whole family shares."""
    scaling = (
        None
        if rope_factor is None
        else Llama3Scaling(
            factor=rope_factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
        )
    )
    return LlamaConfig(
        vocab_size=128256,
        num_kv_heads=8,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=scaling,
        checkpoint_dtype="bfloat16",
        bos_token_id=128000,
        eos_token_ids=(128001, 128008, 128009),  # end of text, of message, of turn
        **_DEFAULTS | sizes,
    )


_SIZES = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
PRESETS: dict[str, LlamaConfig] = {name: _llama(**sizes) for name, sizes in _SIZES.items()}


def preset(name: str) -> LlamaConfig:
    """The preset called `name`, without the prefix. ValueError for an unknown one."""
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]
