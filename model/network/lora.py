"""LoRA adapters (arXiv 2106.09685) of many requests in one step.

The chips hold the adapters in slots. A projection's slots are two arrays: A of all slots, and B of all slots. A token's
inputs are multiplied with A of all slots, what other slots than its own gave becomes zero, and the rest is multiplied
with B of all slots. These are two dense products without a gather or a sort, and the zeros add nothing: a token's sums
are the same whoever shares its step.

Shape legend: `T` tokens of a step (padded), `P` projections of a fused `Linear`, `S` adapter slots, `R` the rank to
which all adapters are padded, `D` inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from model.network.linear_method import multiply
from model.network.row_ops import BY_XLA, RowOps
from pallas_kernels.cpu import per_token

# The projections that an adapter may change, in the names of checkpoints, of each fused `Linear` of a layer in the
# order of its outputs.
TARGETS: dict[str, tuple[str, ...]] = {
    "attention.qkv": ("q_proj", "k_proj", "v_proj"),
    "attention.out": ("o_proj",),
    "mlp.gate_up": ("gate_proj", "up_proj"),
    "mlp.down": ("down_proj",),
}


@dataclass(frozen=True, kw_only=True)
class LoraWeights:
    """One adapter in the host's memory.

    Args:
        identity: of its weights, from their bytes; above 0 and below 2**63.
        layers: for each layer, (A [rank, in], B [out, rank]) by the projection's name, both float32. B has been
            multiplied by the adapter's scale. A projection that the adapter leaves as it is has no entry.
    """

    identity: int
    layers: Sequence[Mapping[str, tuple[np.ndarray, np.ndarray]]]


# A [P, S * R, D], and for each projection B [S * R, outputs]. Of one adapter, S is 1.
Slots = tuple[jax.Array, tuple[jax.Array, ...]]
# For each layer, the slots of a `Linear` by its name in `TARGETS`.
AdapterSlots = Sequence[Mapping[str, Slots]]


@dataclass(frozen=True)
class StepAdapters:
    """The adapters of a step's tokens.

    Args:
        of_tokens: i32[T], the slot of each token, from 1; 0: it has no adapter.
        num_slots: S.
        num_shards: groups into which the outputs of a fused `Linear` are divided (`layers.Attention`).
        ops: of the model.
    """

    slots: AdapterSlots
    of_tokens: jax.Array
    num_slots: int
    num_shards: int
    ops: RowOps = BY_XLA

    def of_layer(self, number: int) -> LayerAdapters:
        """Those of one layer."""
        return LayerAdapters(self, self.slots[number])

    def at(self, only: jax.Array) -> StepAdapters:
        """Those of some tokens (`layers.tokens_at`)."""
        return replace(self, of_tokens=self.of_tokens.at[only].get(mode="fill", fill_value=0))

    @cached_property
    def is_own(self) -> jax.Array:
        """bool[T, S * R]: whether a place in the arrays is one of the token's slot."""
        slot = jnp.arange(1, self.num_slots + 1, dtype=jnp.int32)
        return jnp.repeat(self.of_tokens[:, None] == slot, self.rank, axis=1)

    @property
    def rank(self) -> int:
        """R."""
        num_places: int = self.slots[0]["attention.out"][0].shape[1]
        return num_places // self.num_slots


@dataclass(frozen=True)
class LayerAdapters:
    """The adapters of a step's tokens in one layer."""

    step: StepAdapters
    slots: Mapping[str, Slots]

    def at(self, only: jax.Array) -> LayerAdapters:
        """Those of some tokens."""
        return replace(self, step=self.step.at(only))

    def parts(self, name: str, inputs: jax.Array) -> list[jax.Array]:
        """What the tokens' adapters add to the outputs of a `Linear` of these inputs [T, D]: [T, n] of each of its
        projections."""
        a, of_parts = self.slots[name]
        reduced = multiply(inputs, a.reshape(-1, a.shape[-1])).reshape(-1, *a.shape[:2])
        reduced = jnp.where(self.step.is_own[:, None], reduced, 0)
        return [_product(reduced[:, part], b) for part, b in enumerate(of_parts)]

    def add(self, name: str, inputs: jax.Array, outputs: jax.Array) -> jax.Array:
        """The outputs [T, out] of a `Linear` of these inputs, with what the adapters add to them."""
        step = self.step
        if step.ops.are_in_c:
            return per_token.add_adapters(inputs, outputs, step.of_tokens, *self.slots[name], step.rank)
        groups = [part.reshape(part.shape[0], step.num_shards, -1) for part in self.parts(name, inputs)]
        return outputs + jnp.concatenate(groups, axis=-1).reshape(outputs.shape)


def with_adapters(adapters: LayerAdapters | None, name: str, inputs: jax.Array, outputs: jax.Array) -> jax.Array:
    """`LayerAdapters.add`; the outputs as they are if the tokens have no adapters."""
    return outputs if adapters is None else adapters.add(name, inputs, outputs)


def _product(inputs: jax.Array, b: jax.Array) -> jax.Array:
    precision = lax.Precision.HIGHEST if inputs.dtype == jnp.float32 else None
    return jnp.dot(inputs, b, precision=precision, preferred_element_type=inputs.dtype)
