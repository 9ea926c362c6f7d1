"""The parts of a decoder layer over a flat row of tokens.

Shape legend of this package: `T` tokens in a step (padded), `S` rows of a step, `N` query heads, `K` KV heads, `H` head
dim, `D` embed, `F` mlp, `V` vocab, `L` layers.

Every parameter carries `axes`, the logical names of its dimensions; `model.network.sharding` maps them to a mesh.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from model.config import LlamaConfig
from model.network.linear import Linear, SplitLinear
from model.network.lora import LayerAdapters, with_adapters
from model.network.row_ops import BY_XLA, RowOps


@dataclass(frozen=True)
class AttendProjected:
    """Attention that takes the output of the fused projection. The kernel rotates and splits the heads as it reads."""

    # [T, (N + 2K) * H] (the output of `Attention.qkv`), cos, sin, one layer's K/V -> output [T, N * H], the layer's K/V
    attend: Callable[[jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]


# q [T, N, H], k [T, K, H], v [T, K, H], one layer's K/V -> output [T, N, H], the layer's K/V
Attend = Callable[[jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]
# (path in the layer, shape (out, in), logical axes of both) -> a Linear in the dtype of the model, and in its own form
MakeLinear = Callable[[str, tuple[int, int], tuple[str, str]], Linear | SplitLinear]


class RMSNorm(nnx.Module):
    """Root-mean-square norm (arXiv 1910.07467): statistics in float32, the scale in the model's dtype."""

    def __init__(self, config: LlamaConfig, *, dtype: Any, width: int | None = None):
        self.ops: RowOps = BY_XLA
        self.eps = config.rms_norm_eps
        self.scale = nnx.Param(jnp.ones((width or config.hidden_size,), dtype), axes=("embed",))

    def __call__(self, x: jax.Array) -> jax.Array:
        """The norm of x [T, D], with the shape and dtype of x."""
        return self.ops.norm(x, self.scale[...], self.eps)

    def of_sum(self, x: jax.Array, added: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x + added, and the norm of the sum, [T, D] each."""
        return self.ops.norm_of_sum(x, added, self.scale[...], self.eps)


class Attention(nnx.Module):
    """Fused projections around `attend`, which computes attention of the heads.

    The rows of `qkv` are [queries | keys | values] of the first chip's heads, then of the second's, and so on
    (`num_shards` groups). Each chip computes one product and splits it in three without moving data. With rows grouped
    by head, the TPU compiler changed the layout of the activations. Three small products would leave a GPU half idle.
    """

    def __init__(
        self, config: LlamaConfig, linear: MakeLinear, *, dtype: Any, num_shards: int, input_width: int | None = None
    ):
        self.ops: RowOps = BY_XLA
        self.num_shards = num_shards
        self.heads = config.num_heads // num_shards, config.num_kv_heads // num_shards  # heads of one group
        width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self.qkv = linear("attention.qkv", (width, input_width or config.hidden_size), ("heads", "embed"))
        queries = config.num_heads * config.head_dim
        self.out = linear("attention.out", (config.hidden_size, queries), ("embed", "heads"))

    def __call__(
        self,
        x: jax.Array,
        cos: jax.Array,
        sin: jax.Array,
        kv: Any,
        attend: Attend | AttendProjected,
        adapters: LayerAdapters | None = None,
        only: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """
        Args:
            only: the tokens i32[S] whose outputs are computed (`tokens_at`); None: all. K/V are computed for all.
        """
        columns = self.projected(x, adapters)
        if isinstance(attend, AttendProjected):
            attended, kv = attend.attend(columns, cos, sin, kv)
        else:
            attended, kv = attend(*self.ops.rotate(columns, cos, sin, self.heads, self.num_shards), kv)
            attended = attended.reshape(x.shape[0], -1)
        if only is not None:
            attended, adapters = tokens_at(attended, only), adapters and adapters.at(only)
        return with_adapters(adapters, "attention.out", attended, self.out(attended)), kv

    def projected(self, x: jax.Array, adapters: LayerAdapters | None) -> jax.Array:
        """Queries, keys and values [T, (N + 2K) * H], before the rotation, in the order of the rows of `qkv`."""
        return with_adapters(adapters, "attention.qkv", x, self.qkv(x))


class Mlp(nnx.Module):
    """SwiGLU (arXiv 2002.05202). The rows of `gate_up` are [gate | up] of the first chip's part of F, and so on."""

    def __init__(self, config: LlamaConfig, linear: MakeLinear, *, num_shards: int):
        self.ops: RowOps = BY_XLA
        embed, mlp = config.hidden_size, config.intermediate_size
        self.num_shards = num_shards
        self.gate_up = linear("mlp.gate_up", (2 * mlp, embed), ("mlp", "embed"))
        self.down = linear("mlp.down", (embed, mlp), ("embed", "mlp"))

    def __call__(self, x: jax.Array, adapters: LayerAdapters | None = None) -> jax.Array:
        gated = self.ops.gate(x, self.gate_up(x), self.num_shards, adapters)
        return with_adapters(adapters, "mlp.down", gated, self.down(gated))


class DecoderLayer(nnx.Module):
    """One layer. Attention and MLP each read a normed copy of the residual stream and add their output to it.

    Attributes:
        attention_type: the class of `attention`. Another family may have another one.
    """

    attention_type = Attention

    def __init__(self, config: LlamaConfig, linear: MakeLinear, *, dtype: Any, num_shards: int):
        self.attention_norm = RMSNorm(config, dtype=dtype)
        self.attention = self.attention_type(config, linear, dtype=dtype, num_shards=num_shards)
        self.mlp_norm = RMSNorm(config, dtype=dtype)
        self.mlp = Mlp(config, linear, num_shards=num_shards)

    def __call__(
        self,
        x: jax.Array,
        cos: jax.Array,
        sin: jax.Array,
        kv: Any,
        attend: Attend | AttendProjected,
        adapters: LayerAdapters | None = None,
        only: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """
        Args:
            only: the tokens i32[S] whose outputs [S, D] are computed (`tokens_at`); None: all. All tokens get K/V.
        """
        attended, kv = self.attention(self.attention_norm(x), cos, sin, kv, attend, adapters, only)
        if only is not None:
            x, adapters = tokens_at(x, only), adapters and adapters.at(only)
        x, normed = self.mlp_norm.of_sum(x, attended)
        return x + self.mlp(normed, adapters), kv


def tokens_at(x: jax.Array, only: jax.Array) -> jax.Array:
    """The rows [S, D] of x [T, D] at the tokens i32[S]. A token of T is past the end and gives zeros."""
    return x.at[only].get(mode="fill", fill_value=0)
