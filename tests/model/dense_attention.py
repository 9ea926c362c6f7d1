"""Plain causal attention without pages, the oracle of the tests, and passes of `model.network.llama.Llama` over it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from model.network.layers import Attend
from model.network.llama import Llama


def causal_attention() -> Attend:
    """An `attend` for T tokens that are a whole sequence. It keeps nothing: the K/V handed in (None) come back."""

    def attend(queries: jax.Array, keys: jax.Array, values: jax.Array, kv: Any) -> tuple[jax.Array, Any]:
        tokens, heads, dim = queries.shape
        q = queries.reshape(tokens, keys.shape[1], -1, dim)
        scores = jnp.einsum("tkgh,skh->kgts", q, keys, preferred_element_type=jnp.float32) * dim**-0.5
        causal = jnp.tril(jnp.ones((tokens, tokens), bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1).astype(values.dtype)
        return jnp.einsum("kgts,skh->tkgh", weights, values).reshape(tokens, heads, dim), kv

    return attend


def _hidden(model: Llama, tokens: jax.Array) -> jax.Array:
    nothing = [None] * model.config.num_layers
    return model(tokens, jnp.arange(len(tokens)), nothing, causal_attention())[0]


@nnx.jit
def dense_hidden(model: Llama, tokens: jax.Array) -> jax.Array:
    """[T, D] of one whole sequence, i32[T]."""
    return _hidden(model, tokens)


@nnx.jit
def dense_logits(model: Llama, tokens: jax.Array) -> jax.Array:
    """f32[T, V] of one whole sequence, i32[T]."""
    return model.logits(_hidden(model, tokens))
