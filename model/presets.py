"""The published Llama 3 models by name: their constants without their weights, for sizing and for dummy runs.

Source: the `config.json` of each model's instruct checkpoint in Meta's repositories.
"""

from __future__ import annotations

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


PRESETS: dict[str, LlamaConfig] = {
    "llama-3-8b": _llama(
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        rope_factor=None,
        max_position_embeddings=8192,
    ),
    "llama-3.1-8b": _llama(hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32, rope_factor=8.0),
    "llama-3.1-70b": _llama(hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64, rope_factor=8.0),
    "llama-3.2-1b": _llama(
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        head_dim=64,
        rope_factor=32.0,
        tie_word_embeddings=True,
    ),
    "llama-3.2-3b": _llama(
        hidden_size=3072,
        intermediate_size=8192,
        num_layers=28,
        num_heads=24,
        rope_factor=32.0,
        tie_word_embeddings=True,
    ),
    "llama-3.3-70b": _llama(hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64, rope_factor=8.0),
}


def preset(name: str) -> LlamaConfig:
    """The preset called `name`, without the prefix. ValueError for an unknown one."""
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]
