"""The magnitudes of a model's keys and values, measured by one pass over fixed tokens.

8-bit pages have one scale for the keys and one for the values of each layer and KV head (`pallas_kernels.quantised`).
If a checkpoint has no such scales, they are computed from these magnitudes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from model.network.layers import DecoderLayer
from model.network.llama import Llama

NUM_TOKENS = 512
# Text can have larger values than random tokens. Clipping them costs more quality than a larger scale. The figures are
# in scripts/lab/results/decisions.md.
MARGIN = 1.5


def measured_range(model: Llama) -> np.ndarray:
    """The largest magnitudes of keys and of values that 8-bit pages must hold without clipping, f32[L, 2, K].

    The tokens are the same at every start. For keys, the norms of the rotated pairs are measured, because they do not
    depend on the position. The result is rounded to bfloat16: the order of sums differs between devices, and rarely
    changes the rounded result.
    """
    num_tokens = min(NUM_TOKENS, model.config.max_position_embeddings)
    tokens = np.random.default_rng(0).integers(model.config.vocab_size, size=num_tokens, dtype=np.int32)
    if model.config.bos_token_id is not None:
        tokens[0] = model.config.bos_token_id
    x, cos, sin = jax.jit(Llama.embed)(model, tokens, np.arange(num_tokens, dtype=np.int32))
    largest = []
    for layer in model.layers:
        x, found = _pass(layer, x, cos, sin)
        largest.append(found)
    found = MARGIN * np.stack([_whole(layer) for layer in largest])
    return found.astype(ml_dtypes.bfloat16).astype(np.float32)


def _whole(array: jax.Array) -> np.ndarray:
    """Copies the array to the host in float32. Other processes may hold parts of it."""
    if array.is_fully_addressable:
        return np.asarray(array, np.float32)
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(array, tiled=True), np.float32)


@jax.jit  # compiled once for all layers
def _pass(layer: DecoderLayer, x: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x [T, D] after the layer, and the largest magnitudes of its keys and values, f32[2, K]."""
    return layer(x, cos, sin, None, _attend)


def _attend(queries: jax.Array, keys: jax.Array, values: jax.Array, kv: Any) -> tuple[jax.Array, jax.Array]:
    """Causal attention of one sequence. Returns the output [T, N, H], and the largest magnitudes f32[2, K] in place of
    K/V."""
    tokens, heads, dim = queries.shape
    grouped = queries.reshape(tokens, keys.shape[1], -1, dim)
    scores = jnp.einsum("tkgh,skh->kgts", grouped, keys, preferred_element_type=jnp.float32) * dim**-0.5
    weights = jax.nn.softmax(jnp.where(jnp.tri(tokens, dtype=bool), scores, -jnp.inf), axis=-1).astype(values.dtype)
    attended = jnp.einsum("kgts,skh->tkgh", weights, values).reshape(tokens, heads, dim)
    first, second = jnp.split(keys.astype(jnp.float32), 2, axis=-1)  # the pairs that are rotated
    magnitudes = jnp.hypot(first, second), jnp.abs(values).astype(jnp.float32)
    return attended, jnp.stack([jnp.max(part, axis=(0, 2)) for part in magnitudes])
