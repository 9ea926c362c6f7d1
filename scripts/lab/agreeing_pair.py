"""A model and a draft model of made-up weights that agree on a chosen share of the tokens.

The gain of drafts depends on how many are right, and random weights never agree. Here every layer computes as much
as any, but the last matrices of its attention and MLP are zero, so a token's final hidden state is its own embedding.
The head has the same vector in the row of the token's successor. The model thus walks a cycle through its vocabulary.
The draft model walks the same cycle, except at the tokens where it is to be wrong.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.flax import save_file

from model.config import LlamaConfig
from scripts.building.stand_in_tokenizer import write_stand_in_tokenizer

_LEAST_HIDDEN_SIZE = 128


@dataclass(frozen=True)
class Pair:
    """The folders of two checkpoints with the same tokens, and some tokens of the model's cycle, in its order."""

    model: Path
    draft: Path
    walk: tuple[int, ...]


def write_pair(folder: Path, config: LlamaConfig, agreement: float, *, seed: int = 0) -> Pair:
    """Writes both into new folders of `folder`.

    Args:
        config: of the model. The head and the embedding are kept apart even if they are one in it.
        agreement: probability that a draft after a right one is right, 0 to 1.
    """
    if not 0 <= agreement <= 1:
        raise ValueError(f"--agreement {agreement}: it is a share, from 0 to 1")
    rng = np.random.default_rng(seed)
    order = rng.permutation(config.vocab_size)
    successors = np.empty_like(order)
    successors[order] = np.roll(order, -1)
    wrong = rng.choice(config.vocab_size, round((1 - agreement) * config.vocab_size), replace=False)
    drafted = successors.copy()
    drafted[wrong] = successors[np.roll(wrong, 1)]
    config = replace(config, tie_word_embeddings=False)
    pair = Pair(folder / "model", folder / "draft", tuple(order[:16].tolist()))
    _write(pair.model, config, successors, rng)
    _write(pair.draft, draft_config(config), drafted, rng)
    return pair


def draft_config(config: LlamaConfig) -> LlamaConfig:
    """One layer of a quarter of the model's width, with the same heads' width."""
    num_heads = max(config.hidden_size // 4, _LEAST_HIDDEN_SIZE) // config.head_dim or 1
    hidden_size = num_heads * config.head_dim
    return replace(
        config,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_layers=1,
        num_heads=num_heads,
        num_kv_heads=1,
    )


def _write(folder: Path, config: LlamaConfig, successors: np.ndarray, rng: np.random.Generator) -> None:
    """Writes a checkpoint whose greedy next token after t is `successors[t]`."""
    folder.mkdir()
    dtype = jnp.dtype(config.checkpoint_dtype or "float32")
    width, heads_width, kv_width = (
        config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    )  # fmt: skip

    def random(*shape: int) -> jnp.ndarray:
        return jnp.asarray(rng.standard_normal(shape, np.float32) / np.sqrt(shape[-1]), dtype)

    # Unit vectors in random directions: a token's own is at least three times as long along it as any other's.
    embedding = rng.standard_normal((config.vocab_size, width), np.float32)
    embedding /= np.linalg.norm(embedding, axis=1, keepdims=True)
    head = np.empty_like(embedding)
    head[successors] = embedding
    tensors = {
        "model.embed_tokens.weight": jnp.asarray(embedding, dtype),
        "lm_head.weight": jnp.asarray(head, dtype),
        "model.norm.weight": jnp.ones(width, dtype),
    }
    for i in range(config.num_layers):
        layer = f"model.layers.{i}."
        tensors |= {
            layer + "input_layernorm.weight": jnp.ones(width, dtype),
            layer + "post_attention_layernorm.weight": jnp.ones(width, dtype),
            layer + "self_attn.q_proj.weight": random(heads_width, width),
            layer + "self_attn.k_proj.weight": random(kv_width, width),
            layer + "self_attn.v_proj.weight": random(kv_width, width),
            layer + "self_attn.o_proj.weight": jnp.zeros((width, heads_width), dtype),
            layer + "mlp.gate_proj.weight": random(config.intermediate_size, width),
            layer + "mlp.up_proj.weight": random(config.intermediate_size, width),
            layer + "mlp.down_proj.weight": jnp.zeros((width, config.intermediate_size), dtype),
        }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config.to_hf()))
    write_stand_in_tokenizer(folder, config.vocab_size)
