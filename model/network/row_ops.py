"""The operations of a step on each row of tokens or logits, other than products and attention.

A model holds its operations, and all parts of a step use them. Only `packed` chooses them. `RowOps` computes in XLA, on
any number of chips. On a CPU, the bits of its results depend on the number of rows. `RowOpsInC` computes in C, on one
device, and its bits do not depend on the number of rows.

The shape legend of `layers` applies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp

from model.network.rope import rotate
from pallas_kernels.cpu import per_token


class Adapters(Protocol):
    """The LoRA adapters of the rows in one layer (`lora.LayerAdapters`)."""

    def parts(self, name: str, inputs: jax.Array) -> list[jax.Array]: ...
    def add(self, name: str, inputs: jax.Array, outputs: jax.Array) -> jax.Array: ...


@dataclass(frozen=True)
class RowOps:
    """The operations in XLA. An object is a value: its `repr` is part of a program's identity.

    Args:
        gates_in_float32: computes `gate` in float32. In bfloat16 a CPU rounds after every operation, which is slow.
    """

    gates_in_float32: bool = False
    are_in_c = False  # if True, products also skip rows of zeros at the end of a step

    def norm(self, x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
        """The root-mean-square norm of x [T, D], times scale [D]. Statistics are in float32."""
        x32 = x.astype(jnp.float32)
        normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + epsilon)
        return normed.astype(x.dtype) * scale

    def norm_of_sum(
        self, x: jax.Array, added: jax.Array, scale: jax.Array, epsilon: float
    ) -> tuple[jax.Array, jax.Array]:
        """x + added, [T, D] each, and the norm of the sum."""
        x = x + added
        return x, self.norm(x, scale, epsilon)

    def rotate(
        self, columns: jax.Array, cos: jax.Array, sin: jax.Array, heads: tuple[int, int], num_shards: int
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Splits columns [T, (N + 2K) * H] into rotated queries [T, N, H], rotated keys and values [T, K, H].

        Args:
            heads: N and K in one of the `num_shards` groups of columns (`layers.Attention`).
        """
        num_rows, dim, (num_heads, num_kv_heads) = columns.shape[0], 2 * cos.shape[-1], heads
        groups = columns.reshape(num_rows, num_shards, -1)
        parts = jnp.split(groups, (num_heads * dim, (num_heads + num_kv_heads) * dim), axis=-1)
        queries, keys, values = (part.reshape(num_rows, -1, dim) for part in parts)
        return rotate(queries, cos, sin), rotate(keys, cos, sin), values

    def gate(self, x: jax.Array, columns: jax.Array, num_shards: int, adapters: Adapters | None = None) -> jax.Array:
        """silu(gate) * up, [T, F]. `columns` [T, 2F]: the output of "mlp.gate_up" for x [T, D], without adapters."""
        groups = columns.reshape(columns.shape[0], num_shards, -1)
        if self.gates_in_float32:
            groups = groups.astype(jnp.float32)
        gate, up = jnp.split(groups, 2, axis=-1)
        if adapters is not None:  # added to each half: joining the halves first would write and read both once more
            parts = adapters.parts("mlp.gate_up", x)
            gate, up = (half + part.reshape(half.shape) for half, part in zip((gate, up), parts, strict=True))
        return (jax.nn.silu(gate) * up).reshape(x.shape[0], -1).astype(x.dtype)

    def log_sum_exp(self, logits: jax.Array) -> jax.Array:
        """The logarithm f32[S] of the sum of e^logit over f32[S, V]; -inf if all logits are -inf."""
        return jax.nn.logsumexp(logits, axis=-1)

    def temper(self, logits: jax.Array, greatest: jax.Array, temperature: jax.Array) -> jax.Array:
        """exp((logit - greatest) / temperature), f32[S, V]; `greatest` and `temperature` are f32[S]."""
        return jnp.exp((logits - greatest[:, None]) / temperature[:, None])


BY_XLA = RowOps()


@dataclass(frozen=True)
class RowOpsInC(RowOps):
    """The operations in C, for a model on one device. `packed.pack` refuses a model on several."""

    are_in_c = True
    norm = staticmethod(per_token.norm)
    norm_of_sum = staticmethod(per_token.norm_of_sum)
    log_sum_exp = staticmethod(per_token.log_sum_exp)
    temper = staticmethod(per_token.temper)

    def rotate(
        self, columns: jax.Array, cos: jax.Array, sin: jax.Array, heads: tuple[int, int], num_shards: int
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        return per_token.rotate(columns, cos, sin, heads[0])

    def gate(self, x: jax.Array, columns: jax.Array, num_shards: int, adapters: Adapters | None = None) -> jax.Array:
        return per_token.gate(columns if adapters is None else adapters.add("mlp.gate_up", x, columns))
