"""The arrays in which a device holds LoRA adapters, and the program that writes one of them.

The shape legend of `model.network.lora` applies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Sharding

from model.config import LlamaConfig
from model.network.lora import TARGETS, AdapterSlots, LoraWeights

# Size of a tensor (`LayerTensor.shape`) -> the logical axis over which chips may divide it.
_AXES = {"queries": "heads", "keys": "heads", "mlp": "mlp", "embed": "embed"}


def describe(
    config: LlamaConfig, *, num_slots: int, rank: int, dtype: Any, sharding: Callable[[Sequence[str]], Sharding]
) -> list[dict[str, Any]]:
    """The ShapeDtypeStructs of `AdapterSlots`. If a `Linear` is split over the chips by outputs, its B is split; if it
    is split by inputs, its A is split. The products then need no further exchanges.

    Args:
        config: the config with the stored number of KV heads (`sharding.stored_config`).
        rank: the rank of a slot.
        sharding: gives the sharding of an array with these logical axes (`sharding.RULES`).
    """

    def array(shape: tuple[int, ...], axes: tuple[str, ...]) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding(axes))

    sizes, places, layer = config.sizes, num_slots * rank, {}
    for name, parts in config.family.linears.items():
        shapes = [part.shape for part in parts]
        inputs = shapes[0][1]
        a = array((len(parts), places, sizes[inputs]), ("rows", "rows", _AXES[inputs]))
        layer[name] = (a, tuple(array((places, sizes[out]), ("rows", _AXES[out])) for out, _ in shapes))
    return [layer] * config.num_layers


def staged(weights: LoraWeights, like: AdapterSlots, head_dim: int) -> list[dict[str, Any]]:
    """Copies an adapter to the devices. `like` is the result of `describe` for one slot. The adapter is padded to the
    rank, and its KV heads are repeated."""

    def array(values: np.ndarray, like: Any) -> jax.Array:
        values = values.astype(like.dtype)
        return jax.make_array_from_callback(like.shape, like.sharding, lambda index: values[index])

    return [
        {
            name: jax.tree.map(array, _padded(layer, name, head_dim, like_layer[name]), like_layer[name])
            for name in TARGETS
        }
        for layer, like_layer in zip(weights.layers, like, strict=True)
    ]


def _padded(
    layer: Mapping[str, tuple[np.ndarray, np.ndarray]], name: str, head_dim: int, like: Any
) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """The arrays of one `Linear`. Projections that the adapter does not change have zeros."""
    a, bs = np.zeros(like[0].shape, np.float32), [np.zeros(b.shape, np.float32) for b in like[1]]
    for number, part in enumerate(TARGETS[name]):
        if part in layer:
            own_a, own_b = layer[part]
            a[number, : len(own_a)] = own_a
            if own_b.shape[0] != bs[number].shape[1]:
                own_b = _with_repeated_heads(own_b, bs[number].shape[1], head_dim)
            bs[number][: len(own_a)] = own_b.T
    return a, tuple(bs)


def _with_repeated_heads(b: np.ndarray, num_out: int, head_dim: int) -> np.ndarray:
    """Repeats the KV heads of B [out, rank], so that it has `num_out` outputs."""
    heads = b.reshape(-1, head_dim, b.shape[1])
    return np.repeat(heads, num_out // len(b), axis=0).reshape(num_out, -1)


def write(slots: AdapterSlots, adapter: AdapterSlots, slot: jax.Array) -> AdapterSlots:
    """Writes an adapter into a slot. Compile it with `slots` donated.

    Args:
        adapter: the arrays of one slot.
        slot: i32[1], the number of the slot, from 1.
    """

    def placed(whole: jax.Array, part: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(whole, part, (slot[0] - 1) * part.shape[-2], axis=whole.ndim - 2)

    return jax.tree.map(placed, slots, adapter)


def bytes_of(described: AdapterSlots) -> int:
    """The bytes of the arrays on one device."""
    leaves = jax.tree.leaves(described)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)
