"""LoRA adapters with random weights, and the checkpoints into which they are merged: the oracle of their products."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from model.config import LlamaConfig
from model.loading.hf_format import expected_shapes
from model.network.lora import TARGETS, LoraWeights

ALL = tuple(name for names in TARGETS.values() for name in names)


def random_adapter(
    config: LlamaConfig,
    identity: int,
    *,
    rank: int = 4,
    targets: Iterable[str] = ALL,
    layers: Iterable[int] | None = None,
) -> LoraWeights:
    """It changes what the model says. The identity is also the seed."""
    rng = np.random.default_rng(identity)
    shapes = expected_shapes(config)
    of_layers = []
    for layer in range(config.num_layers):
        pairs = {}
        for name in targets if layers is None or layer in layers else ():
            num_out, num_in = shapes[key_of(layer, name)]
            a, b = rng.normal(size=(rank, num_in)), rng.normal(size=(num_out, rank))
            pairs[name] = (0.1 * a.astype(np.float32), 0.1 * b.astype(np.float32))
        of_layers.append(pairs)
    return LoraWeights(identity=identity, layers=of_layers)


def key_of(layer: int, name: str) -> str:
    """The tensor of a projection."""
    part = "self_attn" if name in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
    return f"model.layers.{layer}.{part}.{name}.weight"


def merged(tensors: dict[str, np.ndarray], adapter: LoraWeights) -> dict[str, np.ndarray]:
    """The checkpoint's tensors with the adapter's products added."""
    changed = {
        key_of(number, name): b @ a for number, layer in enumerate(adapter.layers) for name, (a, b) in layer.items()
    }
    return {name: value + changed.get(name, 0) for name, value in tensors.items()}
