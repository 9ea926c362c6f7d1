"""LoRA adapters (arXiv 2106.09685) of many requests in one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

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
        layers: for each layer, (A [rank, in], B [out, rank]) by the projection's name, both float32. B has been multiplied by
            the adapter's scale. A projection that the adapter leaves as it is has no entry.
    """

    identity: int
    layers: Sequence[Mapping[str, tuple[np.ndarray, np.ndarray]]]
