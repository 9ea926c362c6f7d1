"""Rotary position embeddings (arXiv 2104.09864), in float32 and the half-split form of Hugging Face checkpoints."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from model.config import FactorScaling, LinearScaling, Llama3Scaling, RopeScaling


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> np.ndarray:
    """The radians per position of each pair, f32[H / 2]. They are computed in float64 and rounded once."""
    frequencies = 1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    match scaling:
        case None:
            pass
        case LinearScaling(factor=factor):
            frequencies = frequencies / factor
        case FactorScaling(factors=factors):
            frequencies = frequencies / np.array(factors)
        case Llama3Scaling():
            frequencies = _llama3(frequencies, scaling)
    return frequencies.astype(np.float32)


def _llama3(frequencies: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    """Keeps frequencies with many turns in the original context; divides those with few turns by `factor`."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


def rotation(positions: jax.Array, frequencies: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """cos and sin for positions i32[T], each f32[T, 1, H / 2]. A step computes them once for all layers."""
    angles = positions.astype(jnp.float32)[:, None, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(heads: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turns each pair (i, i + H / 2) of heads [T, N, H], in float32; the result has the dtype of `heads`."""
    first, second = jnp.split(heads.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(heads.dtype)
