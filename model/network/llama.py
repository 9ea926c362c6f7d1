"""Llama 3, and decoders that differ from it in their layers only (`model.families`), over a flat row of tokens.

The model does not know about pages, batches or devices. Attention is a function that the caller passes as `attend`:
serving passes paged attention, and training and tests pass plain causal attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from model.config import LlamaConfig
from model.network.layers import Attend, AttendProjected, RMSNorm
from model.network.linear import Linear, SplitLinear, normal_param, rows_of
from model.network.linear_method import LinearMethod, Unquantized
from model.network.lora import StepAdapters
from model.network.rope import inverse_frequencies, rotation
from model.network.row_ops import BY_XLA, RowOps
from model.quantization.forms import Plain, Rounding, WeightForm


class Llama(nnx.Module):
    """The decoder. Its layers are unrolled, not scanned (`scripts/lab/results/decisions.md`).

    Args:
        config: the config with the stored number of KV heads, repeated over chips (`sharding.stored_config`).
        dtype: the dtype of weights and activations. Rotary embeddings, norm statistics and logits are always float32.
        rngs: the source of random weights; None: zeros, which `nnx.eval_shape` traces faster.
        num_shards: the number of chips over which the heads are split. The order of rows in the fused projections
            (`layers`) depends on it, so weights stored for one number of chips do not fit another.
        quantization: the form of the projections and the head. Some forms keep the head in another form (`in_head`).
            The embedding is not quantised, and a tied head becomes a separate kernel if it is.
        rounding: how the inputs of quantised products are rounded; None: they are not.

    Attributes:
        embedding_method: multiplies with the embedding if it is also the head's kernel.
        ops: the operations on rows (`row_ops`). All modules of the model have the same.
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        dtype: Any,
        rngs: nnx.Rngs | None,
        num_shards: int = 1,
        quantization: WeightForm | None = None,
        rounding: Rounding | None = None,
    ):
        for name in ("num_heads", "num_kv_heads", "intermediate_size", "vocab_size"):
            if getattr(config, name) % num_shards:
                raise ValueError(f"{name}={getattr(config, name)} does not divide over {num_shards=}")
        self.config = config
        self.dtype = jnp.dtype(dtype)
        self.num_shards = num_shards
        self.quantization = quantization
        self.ops: RowOps = BY_XLA
        self.embedding_method: LinearMethod = Unquantized()
        vocab, embed = config.vocab_size, config.hidden_size
        self.embedding = normal_param(rngs, (vocab, embed), dtype, ("vocab", "embed"))
        linear = partial(Linear, dtype=dtype, rngs=rngs)

        def projection(layer: int, name: str, shape: tuple[int, int], axes: tuple[str, str]) -> Linear | SplitLinear:
            path = f"layers.{layer}.{name}"
            if quantization is None or not quantization.is_split(path):
                form = None if quantization is None else quantization.at(path)
                return linear(shape, axes, quantization=form, rounding=rounding)
            parts = {}
            for tensor in config.family.linears[name]:
                part, form = tensor.short_name, quantization.at(f"{path}.{tensor.short_name}")
                of_part = (config.sizes[tensor.shape[0]], shape[1])
                parts[part] = linear(of_part, axes, quantization=form, rounding=rounding)
            return SplitLinear(parts, num_shards)

        make_layer = config.family.layer_type()
        self.layers = nnx.List(
            make_layer(config, partial(projection, number), dtype=dtype, num_shards=num_shards)
            for number in range(config.num_layers)
        )
        self.norm = RMSNorm(config, dtype=dtype)
        # None: the embedding is also the head's kernel.
        is_shared = config.tie_word_embeddings and (quantization is None or quantization.in_head == Plain())
        of_head = replace(rounding, is_static=False) if rounding is not None and rounding.with_head else None
        as_head = partial(linear, quantization=quantization and quantization.in_head, rounding=of_head)
        self.head = None if is_shared else as_head((vocab, embed), ("vocab", "embed"))

    def __call__(
        self,
        tokens: jax.Array,  # i32[T]
        positions: jax.Array,  # i32[T], each token's position in its own sequence
        kv: Sequence[Any],  # one pytree per layer; `attend` takes it and returns it
        attend: Attend | AttendProjected,
    ) -> tuple[jax.Array, list[Any]]:
        """Hidden states [T, D] after the final norm, and the K/V of every layer as `attend` returned them."""
        hidden, new_kv, _ = self.run(tokens, positions, kv, attend)
        return hidden, new_kv

    def run(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        kv: Sequence[Any],
        attend: Attend | AttendProjected,
        taps: Sequence[int] = (),
        adapters: StepAdapters | None = None,
        only: jax.Array | None = None,
    ) -> tuple[jax.Array, list[Any], list[jax.Array]]:
        """The results of `__call__`, and the inputs [T, D] of the layers in `taps`, in that order.

        Args:
            taps: numbers of layers, from 0. The number of layers itself stands for the output of the last layer.
            adapters: the LoRA adapters of the tokens; None: they have none.
            only: the tokens i32[S] whose hidden states [S, D] are computed (`tokens_at`); None: all. The last layer
                computes only K/V for the other tokens. `taps` must be empty then.
        """
        if len(kv) != self.config.num_layers:
            raise ValueError(f"one K/V per layer is needed: {len(kv)=} {self.config.num_layers=}")
        x, cos, sin = self.embed(tokens, positions)
        new_kv, tapped = [], {}
        for number, (layer, layer_kv) in enumerate(zip(self.layers, kv, strict=True)):
            if number in taps:
                tapped[number] = x
            of_layer = None if adapters is None else adapters.of_layer(number)
            is_last = number == len(self.layers) - 1
            x, layer_kv = layer(x, cos, sin, layer_kv, attend, of_layer, only if is_last else None)
            new_kv.append(layer_kv)
        tapped[len(new_kv)] = x
        return self.norm(x), new_kv, [tapped[number] for number in taps]

    def embed(self, tokens: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The first layer's input x [T, D], and cos and sin of the rotation. Padding tokens may have any id. In C, x is
        0 for tokens below 0, in this and every layer: products skip them (`pallas_kernels/cpu/panels.h`)."""
        cos, sin = rotation_of(self.config, positions)
        x = rows_of(self.embedding[...], tokens)
        return jnp.where(tokens[:, None] < 0, 0, x) if self.ops.are_in_c else x, cos, sin

    def logits(self, hidden: jax.Array) -> jax.Array:
        """The logits f32[S, V] of hidden states [S, D] that `__call__` returned."""
        if self.head is None:
            return self.embedding_method.apply(hidden, {"kernel": self.embedding[...]}, jnp.float32)
        return self.head(hidden, out_dtype=jnp.float32)


def rotation_of(config: LlamaConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin of the rotation at positions i32[T], each f32[T, 1, H / 2]."""
    frequencies = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    # Without the barrier XLA computes sines and cosines again in every layer's kernels.
    cos, sin = jax.lax.optimization_barrier(rotation(positions, frequencies))
    return cos, sin
