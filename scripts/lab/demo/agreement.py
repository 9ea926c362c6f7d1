"""Compares a changed model, such as a quantised one, with the exact one, on text that is in no training data."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from model.config import LlamaConfig
from model.execution.kv_range import measured_range
from model.network.layers import Attend
from model.network.llama import Llama
from pallas_kernels import quantised
from scripts.lab.demo.stories import story
from scripts.lab.demo.tokenizer import SampleEncoder
from scripts.lab.demo.trainer import row_logits

# A few tokens have most of a divergence: its mean over 50 stories may be twice the mean over 500.
NUM_STORIES = 500
BATCH = 50  # stories that are computed together
WIDTH = 128  # tokens of each story, at most
SEED = 12345  # not the seed of the training


@dataclass(frozen=True)
class Agreement:
    """Means over all tokens of new text."""

    divergence: float  # mean of KL(exact || changed), in nats per token
    divergence_error: float  # standard error of that mean, over the stories
    same_top_token: float  # share of positions where both models have the same most likely next token


def agreement(exact: Llama, changed: Llama, encoder: SampleEncoder, num_stories: int = NUM_STORIES) -> Agreement:
    """Both models read the same stories."""
    rng = random.Random(SEED)
    rows = [encoder.text(story(rng).text)[:WIDTH] for _ in range(num_stories)]
    batch = min(num_stories, BATCH)
    tokens = np.zeros((-(-num_stories // batch) * batch, WIDTH), np.int32)
    for row, ids in zip(tokens, rows, strict=False):
        row[: len(ids)] = ids
    lengths = np.array([len(ids) for ids in rows])
    batches = [_compare(exact, changed, tokens[i : i + batch]) for i in range(0, len(tokens), batch)]
    divergence, same = (np.concatenate(parts)[:num_stories] for parts in zip(*batches, strict=True))
    counted = np.arange(WIDTH) < lengths[:, None]
    mean = float(divergence[counted].mean())
    excess = np.where(counted, divergence - mean, 0).sum(axis=1)  # of a story's tokens together
    error = float(np.sqrt((excess**2).sum()) / lengths.sum())
    return Agreement(mean, error, float(same[counted].mean()))


@jax.jit
def _compare(exact: Llama, changed: Llama, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """f32[B, R] and bool[B, R]"""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    one_sample = jnp.ones_like(tokens)
    p, q = (jax.nn.log_softmax(row_logits(model, tokens, positions, one_sample)) for model in (exact, changed))
    return jnp.sum(jnp.exp(p) * (p - q), axis=-1), jnp.argmax(p, axis=-1) == jnp.argmax(q, axis=-1)


# ---- keys and values rounded as 8-bit pages hold them ----


def with_narrow_kv(model: Llama, dtype: Any = jnp.int8) -> Any:  # which stands for a Llama
    """`model` with the scales that a start without scales in the checkpoint measures."""
    return _NarrowKv(model, quantised.scales_of(jnp.asarray(measured_range(model)), dtype), jnp.dtype(dtype))


@partial(jax.tree_util.register_dataclass, data_fields=["model", "scales"], meta_fields=["dtype"])
@dataclass(frozen=True)
class _NarrowKv:
    model: Llama
    scales: jax.Array  # f32[L, 2, K]
    dtype: Any

    @property
    def config(self) -> LlamaConfig:
        return self.model.config

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, kv: list[Any], attend: Attend
    ) -> tuple[jax.Array, list[Any]]:
        def of_rounded(
            queries: jax.Array, keys: jax.Array, values: jax.Array, kv: tuple[Any, jax.Array]
        ) -> tuple[jax.Array, Any]:
            layer_kv, scales = kv
            return attend(queries, self._rounded(keys, scales[0]), self._rounded(values, scales[1]), layer_kv)

        return self.model(tokens, positions, list(zip(kv, self.scales, strict=True)), of_rounded)

    def logits(self, hidden: jax.Array) -> jax.Array:
        return self.model.logits(hidden)

    def _rounded(self, x: jax.Array, scales: jax.Array) -> jax.Array:
        return (quantised.quantise(x, scales, self.dtype).astype(jnp.float32) * scales[:, None]).astype(x.dtype)
