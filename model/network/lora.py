"""LoRA adapters (arXiv 2106.09685) of many requests in one step.

The chips hold the adapters in slots. Each projection has two arrays: A of all slots, and B of all slots. The inputs of
a token are multiplied with A of all slots. The results of slots other than the token's own are set to zero. The rest is
multiplied with B of all slots. These are two dense products without a gather or a sort. The zeros add nothing, so the
sums of a token do not depend on the other tokens of its step.

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

from model.families import LLAMA
from model.network.linear_method import multiply
from model.network.row_ops import BY_XLA, RowOps
from pallas_kernels.cpu import per_token

# `Linear` of a layer -> the projections that it fuses, in the order of its outputs. They have the names of checkpoints.
# An adapter may change all of them.
TARGETS: dict[str, tuple[str, ...]] = {
    name: tuple(tensor.short_name for tensor in tensors) for name, tensors in LLAMA.linears.items()
}


@dataclass(frozen=True, kw_only=True)
class LoraWeights:
    """One adapter in the host's memory.

    Args:
        identity: a digest of the bytes of the weights, above 0 and below 2**63.
        layers: for each layer, (A [rank, in], B [out, rank]) by the projection's name, both float32. B has been
            multiplied by the adapter's scale. A projection that the adapter does not change has no entry.
    """

    identity: int
    layers: Sequence[Mapping[str, tuple[np.ndarray, np.ndarray]]]


# A [P, S * R, D], and for each projection B [S * R, outputs]. For the weights of one adapter, S is 1.
Slots = tuple[jax.Array, tuple[jax.Array, ...]]
# For each layer, the slots of a `Linear` by its name in `TARGETS`.
AdapterSlots = Sequence[Mapping[str, Slots]]


@dataclass(frozen=True)
class StepAdapters:
    """The adapters of a step's tokens.

    Args:
        of_tokens: i32[T], the slot of each token, from 1; 0: it has no adapter.
        num_slots: S, the number of slots.
        num_shards: the number of groups into which the outputs of a fused `Linear` are divided (`layers.Attention`).
        ops: the model's operations (`row_ops`).
    """

    slots: AdapterSlots
    of_tokens: jax.Array
    num_slots: int
    num_shards: int
    ops: RowOps = BY_XLA

    def of_layer(self, number: int) -> LayerAdapters:
        """The tokens' adapters in layer `number`, from 0."""
        return LayerAdapters(self, self.slots[number])

    def at(self, only: jax.Array) -> StepAdapters:
        """The adapters of the tokens i32[S] in `only` (`layers.tokens_at`). A token past the end has none."""
        return replace(self, of_tokens=self.of_tokens.at[only].get(mode="fill", fill_value=0))

    @cached_property
    def is_own(self) -> jax.Array:
        """bool[T, S * R]: whether a place in the arrays belongs to the token's slot."""
        slot = jnp.arange(1, self.num_slots + 1, dtype=jnp.int32)
        return jnp.repeat(self.of_tokens[:, None] == slot, self.rank, axis=1)

    @property
    def rank(self) -> int:
        """R, the rank to which all adapters are padded."""
        num_places: int = self.slots[0]["attention.out"][0].shape[1]
        return num_places // self.num_slots


@dataclass(frozen=True)
class LayerAdapters:
    """The adapters of a step's tokens in one layer."""

    step: StepAdapters
    slots: Mapping[str, Slots]

    def at(self, only: jax.Array) -> LayerAdapters:
        """The layer's adapters of the tokens i32[S] in `only`."""
        return replace(self, step=self.step.at(only))

    def parts(self, name: str, inputs: jax.Array) -> list[jax.Array]:
        """What the tokens' adapters add to the outputs of the `Linear` `name` for inputs [T, D]: an array [T, n] for
        each of the projections that it fuses."""
        a, of_parts = self.slots[name]
        reduced = multiply(inputs, a.reshape(-1, a.shape[-1])).reshape(-1, *a.shape[:2])
        reduced = jnp.where(self.step.is_own[:, None], reduced, 0)
        return [_product(reduced[:, part], b) for part, b in enumerate(of_parts)]

    def add(self, name: str, inputs: jax.Array, outputs: jax.Array) -> jax.Array:
        """The outputs [T, out] of the `Linear` `name` for these inputs, plus what the adapters add to them."""
        step = self.step
        if step.ops.are_in_c:
            return per_token.add_adapters(inputs, outputs, step.of_tokens, *self.slots[name], step.rank)
        groups = [part.reshape(part.shape[0], step.num_shards, -1) for part in self.parts(name, inputs)]
        return outputs + jnp.concatenate(groups, axis=-1).reshape(outputs.shape)


def with_adapters(adapters: LayerAdapters | None, name: str, inputs: jax.Array, outputs: jax.Array) -> jax.Array:
    """The outputs with what `LayerAdapters.add` adds to them; unchanged if `adapters` is None."""
    return outputs if adapters is None else adapters.add(name, inputs, outputs)


def _product(inputs: jax.Array, b: jax.Array) -> jax.Array:
    precision = lax.Precision.HIGHEST if inputs.dtype == jnp.float32 else None
    return jnp.dot(inputs, b, precision=precision, preferred_element_type=inputs.dtype)
