"""Qwen3 as a second family of decoders: Llama with a norm of each query head and each key head before the rotation.

The engine does not serve it. The tests add it to `model.families.FAMILIES`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from model.config import LlamaConfig
from model.families import LLAMA, Family, LayerTensor
from model.network.layers import Attention, DecoderLayer, MakeLinear, RMSNorm
from model.network.lora import LayerAdapters


class NormedAttention(Attention):
    """Attention whose query heads and key heads are normed."""

    def __init__(self, config: LlamaConfig, linear: MakeLinear, *, dtype: Any, num_shards: int):
        super().__init__(config, linear, dtype=dtype, num_shards=num_shards)
        self.query_norm = RMSNorm(config, dtype=dtype, width=config.head_dim)
        self.key_norm = RMSNorm(config, dtype=dtype, width=config.head_dim)

    def projected(self, x: jax.Array, adapters: LayerAdapters | None) -> jax.Array:
        columns, (queries, keys) = super().projected(x, adapters), self.heads
        heads = columns.reshape(len(x), self.num_shards, queries + 2 * keys, -1)
        parts = jnp.split(heads, (queries, queries + keys), axis=2)
        normed = [
            norm(part.reshape(-1, part.shape[-1])).reshape(part.shape)
            for norm, part in zip((self.query_norm, self.key_norm), parts, strict=False)
        ]
        return jnp.concatenate([*normed, parts[2]], axis=2).reshape(columns.shape)


class Qwen3Layer(DecoderLayer):
    attention_type = NormedAttention


QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    settings={"hidden_act": ("silu",), "attention_bias": (False,), "use_sliding_window": (False,)},
    tensors=(
        *LLAMA.tensors,
        LayerTensor("attention.query_norm.scale", "self_attn.q_norm", ("head",)),
        LayerTensor("attention.key_norm.scale", "self_attn.k_norm", ("head",)),
    ),
    layer=f"{__name__}:Qwen3Layer",
)
