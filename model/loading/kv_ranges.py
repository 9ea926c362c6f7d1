"""The ranges of keys and values, from the K/V scales of a checkpoint.

A range is a scale times the largest number of the 8-bit type that the scale is for, so pages can have another 8-bit
type than the checkpoint says. If a checkpoint has no K/V scales, `model.execution.kv_range` measures the ranges.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from model.config import LlamaConfig

Find = Callable[[str], np.ndarray | None]  # the values of a tensor in float32, flat; None: there is none of this name
# In a layer's attention, the first one that is there: compressed-tensors' and AutoFP8's, ModelOpt's, older
# compressed-tensors', and AutoFP8's older scale of both.
_NAMES = (
    ("k_scale", "k_proj.k_scale", "k_proj.output_scale", "kv_scale"),
    ("v_scale", "v_proj.v_scale", "v_proj.output_scale", "kv_scale"),
)


def read_kv_ranges(find: Find, config: LlamaConfig) -> np.ndarray | None:
    """f32[L, 2, K] for the checkpoint's own KV heads. None if it has no K/V scales, or if all of them are 1, which
    writers store when they have not measured anything.

    Raises:
        ValueError: only some layers have K/V scales, or a scale is not one positive number or one for each KV head.
    """
    scales = [[_read(find, layer, names, config) for names in _NAMES] for layer in range(config.num_layers)]
    found = [scale for layer in scales for scale in layer if scale is not None]
    if not found:
        return None
    if len(found) < 2 * config.num_layers:
        raise ValueError(f"the checkpoint has {len(found)} K/V scales for {config.num_layers} layers, and needs 2 each")
    whole = np.array(found, np.float32).reshape(config.num_layers, 2, config.num_kv_heads)
    if (whole == 1).all():
        return None
    return whole * np.float32(config.kv_scale_type.largest)


def _read(find: Find, layer: int, names: tuple[str, ...], config: LlamaConfig) -> np.ndarray | None:
    """f32[K]"""
    for key in (f"model.layers.{layer}.self_attn.{name}" for name in names):
        if (scales := find(key)) is None:
            continue
        if scales.size not in (1, config.num_kv_heads) or not (np.isfinite(scales) & (scales > 0)).all():
            raise ValueError(
                f"{key} must be one positive number, or one for each of the {config.num_kv_heads} KV heads"
            )
        return np.broadcast_to(scales, config.num_kv_heads)
    return None
