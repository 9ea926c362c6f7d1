"""Dense causal attention in numpy, row by row. `self_test` and the benches compare with it. It shares no code with any
backend."""

from __future__ import annotations

import numpy as np


def attend(
    queries: np.ndarray,  # [Q, N, H], the last ones of the sequence
    keys: np.ndarray,  # [L, K, H]
    values: np.ndarray,  # [L, K, H]
    *,
    scale: float,
) -> np.ndarray:
    """The attention f32[Q, N, H] of a sequence's last Q tokens over its L tokens."""
    group = queries.shape[1] // keys.shape[1]
    keys, values = (np.repeat(x.astype(np.float32), group, axis=1).swapaxes(0, 1) for x in (keys, values))  # [N, L, H]
    scores = queries.astype(np.float32).swapaxes(0, 1) @ keys.swapaxes(1, 2) * np.float32(scale)  # [N, Q, L]
    position = keys.shape[1] - len(queries) + np.arange(len(queries))
    scores = np.where(np.arange(keys.shape[1]) <= position[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True) @ values).swapaxes(0, 1)
