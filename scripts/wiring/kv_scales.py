"""The scales of 8-bit K/V pages: from the checkpoint, or measured when its weights are in place."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from model.network.llama import Llama
    from pallas_kernels.spec import AttentionSpec


def find_kv_scales(model: Llama, stored: np.ndarray | None, spec: AttentionSpec) -> tuple[np.ndarray, str]:
    """The scales f32[L, 2, K] for the stored KV heads, and their origin in words.

    Args:
        model: its weights are in place.
        stored: the ranges that the checkpoint has (`StoredWeights.kv_ranges`); None: they are measured, on all hosts
            at once.
    """
    import jax.numpy as jnp
    import numpy as np

    from model.execution.kv_range import measured_range
    from pallas_kernels.quantised import scales_of

    ranges, origin = stored, "with the checkpoint's scales"
    if ranges is None:
        ranges, origin = measured_range(model), "with scales measured on fixed tokens"
    ranges = np.repeat(ranges, spec.num_kv_heads // ranges.shape[2], axis=2)  # KV heads may be stored repeated
    return np.asarray(scales_of(jnp.asarray(ranges), spec.kv_dtype)), origin
