"""What a step computes of each row of tokens or logits besides products and attention.

A model holds its operations, and all parts of its steps take them from there: `packed` alone chooses them. Results by
XLA are right on any number of chips; on a CPU their bits depend on the number of rows. Those in C do not, and are of
one device.

Shape legend: as in `layers`.
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
    """The operations by XLA. A value: its `repr` is part of a program's identity.

    Args:
        gates_in_float32: in bfloat16 a CPU rounds after every operation, which takes most of its time.
    """

    gates_in_float32: bool = False
    are_in_c = False  # products then skip rows of zeros at the end of a step, too

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
        """The rotated queries [T, N, H] and keys [T, K, H], and the values, of columns [T, (N + 2K) * H].

        Args:
            heads: N and K of one of the `num_shards` groups of columns (`layers.Attention`).
        """
        num_rows, dim, (num_heads, num_kv_heads) = columns.shape[0], 2 * cos.shape[-1], heads
        groups = columns.reshape(num_rows, num_shards, -1)
        parts = jnp.split(groups, (num_heads * dim, (num_heads + num_kv_heads) * dim), axis=-1)
        queries, keys, values = (part.reshape(num_rows, -1, dim) for part in parts)
        return rotate(queries, cos, sin), rotate(keys, cos, sin), values

    def gate(self, x: jax.Array, columns: jax.Array, num_shards: int, adapters: Adapters | None = None) -> jax.Array:
        """silu(gate) * up, [T, F], of columns [T, 2F], the product "mlp.gate_up" of x [T, D] without its adapters."""
        groups = columns.reshape(columns.shape[0], num_shards, -1)
        if self.gates_in_float32:
            groups = groups.astype(jnp.float32)
        gate, up = jnp.split(groups, 2, axis=-1)
        if adapters is not None:  # added to each half: joined first, both would be written and read once more
            parts = adapters.parts("mlp.gate_up", x)
            gate, up = (half + part.reshape(half.shape) for half, part in zip((gate, up), parts, strict=True))
        return (jax.nn.silu(gate) * up).reshape(x.shape[0], -1).astype(x.dtype)

    def log_sum_exp(self, logits: jax.Array) -> jax.Array:
        """The logarithm of the sum of e^logit, f32[S] of f32[S, V]; -inf if all logits are."""
        return jax.nn.logsumexp(logits, axis=-1)

    def temper(self, logits: jax.Array, greatest: jax.Array, temperature: jax.Array) -> jax.Array:
        """exp of (logit - greatest) / temperature, f32[S, V] of f32[S, V] and two f32[S]."""
        return jnp.exp((logits - greatest[:, None]) / temperature[:, None])


BY_XLA = RowOps()


@dataclass(frozen=True)
class RowOpsInC(RowOps):
    """The operations in C, of a model on one device: `packed.pack` refuses others."""

    are_in_c = True

    def norm(self, x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
        return per_token.norm(x, scale, epsilon)

    def norm_of_sum(
        self, x: jax.Array, added: jax.Array, scale: jax.Array, epsilon: float
    ) -> tuple[jax.Array, jax.Array]:
        return per_token.norm_of_sum(x, added, scale, epsilon)

    def rotate(
        self, columns: jax.Array, cos: jax.Array, sin: jax.Array, heads: tuple[int, int], num_shards: int
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        return per_token.rotate(columns, cos, sin, heads[0])

    def gate(self, x: jax.Array, columns: jax.Array, num_shards: int, adapters: Adapters | None = None) -> jax.Array:
        return per_token.gate(columns if adapters is None else adapters.add("mlp.gate_up", x, columns))

    def log_sum_exp(self, logits: jax.Array) -> jax.Array:
        return per_token.log_sum_exp(logits)

    def temper(self, logits: jax.Array, greatest: jax.Array, temperature: jax.Array) -> jax.Array:
        return per_token.temper(logits, greatest, temperature)
