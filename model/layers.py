"""The parts of a decoder layer over a flat row of tokens.

Shape legend of this room: `T` tokens in a step (padded), `N` query heads, `K` KV heads, `G = N // K` query heads per KV
head, `H` head dim, `D` embed, `F` mlp, `V` vocab.

Every parameter carries `axes`, the logical names of its dimensions; `model.sharding` maps them to a mesh.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from model.config import LlamaConfig
from model.rope import rotate

INIT_STDDEV = 0.02

# q [T, N, H], k [T, K, H], v [T, K, H], one layer's K/V -> output [T, N, H], the layer's K/V
Attend = Callable[[jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]


def project(inputs: jax.Array, kernel: jax.Array, *, out_dtype: Any = None) -> jax.Array:
    """inputs [..., D] times kernel [D, ...]. A float32 model means float32 on every chip, not its fast mode."""
    return jax.lax.dot_general(
        inputs,
        kernel,
        (((inputs.ndim - 1,), (0,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if inputs.dtype == jnp.float32 else None,
        preferred_element_type=out_dtype or inputs.dtype,
    )


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...], dtype: Any, axes: tuple[str, ...]) -> nnx.Param[jax.Array]:
    return nnx.Param(INIT_STDDEV * jax.random.normal(rngs.params(), shape, dtype), axes=axes)


class RMSNorm(nnx.Module):
    """Root-mean-square norm (arXiv 1910.07467): statistics in float32, the scale in the model's dtype, as trained."""

    def __init__(self, config: LlamaConfig, *, dtype: Any):
        self.eps = config.rms_norm_eps
        self.scale = nnx.Param(jnp.ones((config.hidden_size,), dtype), axes=("embed",))

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        return normed.astype(x.dtype) * self.scale[...]


class Attention(nnx.Module):
    """Fused projections around whatever `attend` does with the heads.

    The columns of `qkv` are grouped by KV head, (G query heads, key, value) x H each: split over chips by KV head,
    every chip holds whole groups, and nothing moves between chips before the output projection.
    """

    def __init__(self, config: LlamaConfig, *, dtype: Any, rngs: nnx.Rngs):
        self.num_kv_heads = config.num_kv_heads
        self.queries_per_kv = config.queries_per_kv
        self.head_dim = config.head_dim
        width = config.num_kv_heads * (config.queries_per_kv + 2) * config.head_dim
        self.qkv = _normal(rngs, (config.hidden_size, width), dtype, ("embed", "kv_heads"))
        self.out = _normal(
            rngs, (config.num_heads * config.head_dim, config.hidden_size), dtype, ("kv_heads", "embed")
        )

    def __call__(
        self, x: jax.Array, cos: jax.Array, sin: jax.Array, kv: Any, attend: Attend
    ) -> tuple[jax.Array, Any]:
        tokens, group = x.shape[0], self.queries_per_kv
        heads = project(x, self.qkv[...]).reshape(tokens, self.num_kv_heads, group + 2, self.head_dim)
        queries = heads[:, :, :group].reshape(tokens, -1, self.head_dim)  # [T, N, H]
        keys, values = heads[:, :, group], heads[:, :, group + 1]  # [T, K, H]
        attended, kv = attend(rotate(queries, cos, sin), rotate(keys, cos, sin), values, kv)
        return project(attended.reshape(tokens, -1), self.out[...]), kv


class Mlp(nnx.Module):
    """SwiGLU (arXiv 2002.05202). `gate_up` is [D, 2, F]: split over chips by its last axis, gate stays beside up."""

    def __init__(self, config: LlamaConfig, *, dtype: Any, rngs: nnx.Rngs):
        embed, mlp = config.hidden_size, config.intermediate_size
        self.gate_up = _normal(rngs, (embed, 2, mlp), dtype, ("embed", "pair", "mlp"))
        self.down = _normal(rngs, (mlp, embed), dtype, ("mlp", "embed"))

    def __call__(self, x: jax.Array) -> jax.Array:
        gate_up = project(x, self.gate_up[...])  # [T, 2, F]
        return project(jax.nn.silu(gate_up[:, 0]) * gate_up[:, 1], self.down[...])


class DecoderLayer(nnx.Module):
    def __init__(self, config: LlamaConfig, *, dtype: Any, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config, dtype=dtype)
        self.attention = Attention(config, dtype=dtype, rngs=rngs)
        self.mlp_norm = RMSNorm(config, dtype=dtype)
        self.mlp = Mlp(config, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: jax.Array, cos: jax.Array, sin: jax.Array, kv: Any, attend: Attend
    ) -> tuple[jax.Array, Any]:
        attended, kv = self.attention(self.attention_norm(x), cos, sin, kv, attend)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), kv
