"""EAGLE and EAGLE-3 heads: one layer that predicts the tokens of a Llama from its hidden states.

At position p the head reads the token at p + 1 and the model's features at p, and its output predicts the token at
p + 2. For the next token, the head reads its own output in place of features.

The shape legend of `layers` applies. `B` is the number of tokens that the head can draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from model.eagle_config import NUM_TAPS, EagleConfig, EagleForm
from model.network.layers import Attend, AttendProjected, Attention, MakeLinear, Mlp, RMSNorm
from model.network.linear import Linear, normal_param, rows_of
from model.network.llama import Llama, rotation_of

# The logit of a token that the head cannot draft. It is finite: sums and products with it are not NaN.
LEAST_LOGIT = -1e30


@dataclass(frozen=True)
class DraftVocabulary:
    """The tokens that a head can draft, if these are not all tokens of the model."""

    to_model: jax.Array  # i32[B], the model's token of each of the head's
    to_draft: jax.Array  # i32[V], the head's token of each of the model's; -1: none

    def spread(self, logits: jax.Array) -> jax.Array:
        """The logits f32[S, V] of all tokens, from the head's logits f32[S, B]. Others have `LEAST_LOGIT`."""
        spread = logits.at[:, jnp.maximum(self.to_draft, 0)].get(mode="clip")
        return jnp.where(self.to_draft >= 0, spread, LEAST_LOGIT)


class EagleLayer(nnx.Module):
    """The layer of a head. In EAGLE it has no norm before its attention, because features are normed. In EAGLE-3 the
    input of its attention is the normed embedding and the normed features, concatenated."""

    def __init__(self, config: EagleConfig, linear: MakeLinear, *, dtype: Any, num_shards: int):
        layer, has_norms = config.layer, config.form is EagleForm.EAGLE3
        self.norms_residual = config.norms_residual
        self.embedding_norm = RMSNorm(layer, dtype=dtype) if has_norms else None
        self.feature_norm = RMSNorm(layer, dtype=dtype) if has_norms else None
        width = (1 + has_norms) * layer.hidden_size
        self.attention = Attention(layer, linear, dtype=dtype, num_shards=num_shards, input_width=width)
        self.mlp_norm = RMSNorm(layer, dtype=dtype)
        self.mlp = Mlp(layer, linear, num_shards=num_shards)

    def __call__(
        self,
        embedded: jax.Array,  # [T, D]; used by EAGLE-3 only
        x: jax.Array,  # [T, D]
        cos: jax.Array,
        sin: jax.Array,
        kv: Any,
        attend: Attend | AttendProjected,
    ) -> tuple[jax.Array, Any]:
        inputs = x
        if self.embedding_norm is not None and self.feature_norm is not None:
            normed = self.feature_norm(x)
            inputs = jnp.concatenate([self.embedding_norm(embedded), normed], axis=-1)
            x = normed if self.norms_residual else x
        attended, kv = self.attention(inputs, cos, sin, kv, attend)
        x, normed = self.mlp_norm.of_sum(x, attended)
        return x + self.mlp(normed), kv


class EagleHead(nnx.Module):
    """An EAGLE or EAGLE-3 head. Its methods take the model, because a head may share the model's embedding and head.

    Args:
        config: the head's config with the stored number of KV heads (`sharding.stored_config`).
        dtype, rngs, num_shards: the same as for `Llama`.
        has_embedding: the head has an embedding of its own.
    """

    def __init__(
        self,
        config: EagleConfig,
        *,
        dtype: Any,
        rngs: nnx.Rngs | None,
        num_shards: int = 1,
        has_embedding: bool = False,
    ):
        self.eagle = config
        self.config = layer = config.layer
        self.dtype = jnp.dtype(dtype)
        width, vocab = layer.hidden_size, layer.vocab_size
        linear = partial(Linear, dtype=dtype, rngs=rngs)
        self.embedding = normal_param(rngs, (vocab, width), dtype, ("vocab", "embed")) if has_embedding else None
        is_third = config.form is EagleForm.EAGLE3
        inputs = NUM_TAPS * config.model_width if is_third else 2 * width
        self.fc = linear((width, inputs), ("embed", "mlp"))
        self.layer = EagleLayer(config, lambda _, shape, axes: linear(shape, axes), dtype=dtype, num_shards=num_shards)
        self.norm = RMSNorm(layer, dtype=dtype) if is_third else None
        self.head = linear((config.draft_vocab_size, width), ("vocab", "embed")) if is_third else None
        has_own = config.draft_vocab_size < vocab
        self.to_model = _whole((config.draft_vocab_size,)) if has_own else None
        self.to_draft = _whole((vocab,)) if has_own else None

    @property
    def vocabulary(self) -> DraftVocabulary | None:
        """The tokens that the head drafts; None: all tokens of the model."""
        if self.to_model is None or self.to_draft is None:
            return None
        return DraftVocabulary(self.to_model[...], self.to_draft[...])

    def features(self, hidden: jax.Array, tapped: Sequence[jax.Array]) -> jax.Array:
        """The model's features [T, D] that the head reads, from the results of `Llama.run` with `EagleConfig.taps`."""
        return hidden if self.norm is None else self.fc(jnp.concatenate(tapped, axis=-1))

    def __call__(
        self,
        model: Llama,
        tokens: jax.Array,  # i32[T], at the positions after `positions`
        positions: jax.Array,  # i32[T]
        features: jax.Array,  # [T, D], the model's features at `positions`, or the head's own
        kv: Any,
        attend: Attend | AttendProjected,
    ) -> tuple[jax.Array, Any]:
        """The head's own features [T, D], and its K/V as `attend` returned them."""
        embedding = model.embedding if self.embedding is None else self.embedding
        embedded = rows_of(embedding[...], tokens).astype(features.dtype)
        cos, sin = rotation_of(self.config, positions)
        x = features
        if self.norm is None:
            x = self.fc(jnp.concatenate([embedded, features], axis=-1))
        return self.layer(embedded, x, cos, sin, kv, attend)

    def logits(self, model: Llama, features: jax.Array) -> jax.Array:
        """The logits f32[S, B] of the head's own features [S, D]."""
        if self.norm is None or self.head is None:
            return model.logits(features)
        return self.head(self.norm(features), out_dtype=jnp.float32)


def _whole(shape: tuple[int, ...]) -> nnx.Param[jax.Array]:
    """A table of token ids, initially 0. Every chip has all of it."""
    return nnx.Param(jnp.zeros(shape, jnp.int32), axes=("rows",))
