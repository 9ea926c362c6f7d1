"""The parts of a decoder layer over a flat row of tokens.

Shape legend of this room: `T` tokens in a step (padded), `S` rows of a step, `N` query heads, `K` KV heads, `H` head
dim, `D` embed, `F` mlp, `V` vocab, `L` layers.

Every parameter carries `axes`, the logical names of its dimensions; `model.network.sharding` maps them to a mesh.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from model.config import LlamaConfig
from model.network.cpu_products import multiply_few
from model.network.rope import rotate

INIT_STDDEV = 0.02

# q [T, N, H], k [T, K, H], v [T, K, H], one layer's K/V -> output [T, N, H], the layer's K/V
Attend = Callable[[jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]


def project(inputs: jax.Array, kernel: jax.Array, *, for_cpu: bool, out_dtype: Any = None) -> jax.Array:
    """inputs [T, in] times the transpose of kernel [out, in]: [T, out]. Float32 means float32 on every chip, not its
    fast mode. `for_cpu`: in the forms of `cpu_products`, where those gain."""
    out_dtype = out_dtype or inputs.dtype
    if for_cpu and (product := multiply_few(inputs, kernel, out_dtype)) is not None:
        return product
    return jax.lax.dot_general(
        inputs,
        kernel,
        (((1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if inputs.dtype == jnp.float32 else None,
        preferred_element_type=out_dtype,
    )


def normal_param(rngs: nnx.Rngs, shape: tuple[int, ...], dtype: Any, axes: tuple[str, ...]) -> nnx.Param[jax.Array]:
    return nnx.Param(INIT_STDDEV * jax.random.normal(rngs.params(), shape, dtype), axes=axes)


class RMSNorm(nnx.Module):
    """Root-mean-square norm (arXiv 1910.07467): statistics in float32, the scale in the model's dtype."""

    def __init__(self, config: LlamaConfig, *, dtype: Any):
        self.eps = config.rms_norm_eps
        self.scale = nnx.Param(jnp.ones((config.hidden_size,), dtype), axes=("embed",))

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        return normed.astype(x.dtype) * self.scale[...]


class Attention(nnx.Module):
    """Fused projections around whatever `attend` does with the heads.

    The rows of `qkv` are [queries | keys | values] of the first chip's heads, then of the second's, and so on
    (`num_shards` groups): each chip multiplies once and cuts its product in three without moving anything. Grouping by
    head instead made the TPU compiler re-lay the activations; three products leave small GPU kernels half empty.
    """

    def __init__(self, config: LlamaConfig, *, dtype: Any, rngs: nnx.Rngs, num_shards: int, for_cpu: bool):
        self.head_dim = config.head_dim
        self.num_shards = num_shards
        self.for_cpu = for_cpu
        self.query_width = config.num_heads * config.head_dim // num_shards  # rows of one group
        self.kv_width = config.num_kv_heads * config.head_dim // num_shards
        width = num_shards * (self.query_width + 2 * self.kv_width)
        self.qkv = normal_param(rngs, (width, config.hidden_size), dtype, ("heads", "embed"))
        self.out = normal_param(
            rngs, (config.hidden_size, config.num_heads * config.head_dim), dtype, ("embed", "heads")
        )

    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array, kv: Any, attend: Attend) -> tuple[jax.Array, Any]:
        groups = project(x, self.qkv[...], for_cpu=self.for_cpu).reshape(x.shape[0], self.num_shards, -1)
        cuts = (self.query_width, self.query_width + self.kv_width)
        queries, keys, values = (self._heads(part) for part in jnp.split(groups, cuts, axis=-1))
        attended, kv = attend(rotate(queries, cos, sin), rotate(keys, cos, sin), values, kv)
        return project(attended.reshape(x.shape[0], -1), self.out[...], for_cpu=self.for_cpu), kv

    def _heads(self, columns: jax.Array) -> jax.Array:
        return columns.reshape(columns.shape[0], -1, self.head_dim)  # [T, N or K, H]


class Mlp(nnx.Module):
    """SwiGLU (arXiv 2002.05202). The rows of `gate_up` are [gate | up] of the first chip's part of F, and so on."""

    def __init__(self, config: LlamaConfig, *, dtype: Any, rngs: nnx.Rngs, num_shards: int, for_cpu: bool):
        embed, mlp = config.hidden_size, config.intermediate_size
        self.num_shards = num_shards
        self.for_cpu = for_cpu
        self.gate_up = normal_param(rngs, (2 * mlp, embed), dtype, ("mlp", "embed"))
        self.down = normal_param(rngs, (embed, mlp), dtype, ("embed", "mlp"))

    def __call__(self, x: jax.Array) -> jax.Array:
        tokens = x.shape[0]
        groups = project(x, self.gate_up[...], for_cpu=self.for_cpu).reshape(tokens, self.num_shards, -1)
        gate, up = jnp.split(groups, 2, axis=-1)
        gated = (jax.nn.silu(gate) * up).reshape(tokens, -1)
        return project(gated, self.down[...], for_cpu=self.for_cpu)


class DecoderLayer(nnx.Module):
    def __init__(self, config: LlamaConfig, *, dtype: Any, rngs: nnx.Rngs, num_shards: int, for_cpu: bool):
        form = {"dtype": dtype, "rngs": rngs, "num_shards": num_shards, "for_cpu": for_cpu}
        self.attention_norm = RMSNorm(config, dtype=dtype)
        self.attention = Attention(config, **form)
        self.mlp_norm = RMSNorm(config, dtype=dtype)
        self.mlp = Mlp(config, **form)

    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array, kv: Any, attend: Attend) -> tuple[jax.Array, Any]:
        attended, kv = self.attention(self.attention_norm(x), cos, sin, kv, attend)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), kv
