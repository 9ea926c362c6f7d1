"""Compares a changed model, such as a quantised one, with the exact one, on text that is in no training data."""

from __future__ import annotations

import random
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from model.network.llama import Llama
from scripts.demo.stories import story
from scripts.demo.tokenizer import SampleEncoder
from scripts.demo.trainer import row_logits

NUM_STORIES = 50
WIDTH = 128  # tokens of each story, at most
SEED = 12345  # not the seed of the training


@dataclass(frozen=True)
class Agreement:
    """Means over all tokens of new text."""

    divergence: float  # mean of KL(exact || changed), in nats per token
    same_top_token: float  # share of positions where both models have the same most likely next token


def agreement(exact: Llama, changed: Llama, encoder: SampleEncoder, num_stories: int = NUM_STORIES) -> Agreement:
    """Both models read the same stories."""
    rng = random.Random(SEED)
    rows = [encoder.text(story(rng).text)[:WIDTH] for _ in range(num_stories)]
    tokens = np.zeros((num_stories, WIDTH), np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    counted = np.arange(WIDTH) < np.array([len(ids) for ids in rows])[:, None]
    divergence, same = _compare(exact, changed, tokens)
    return Agreement(float(divergence[counted].mean()), float(same[counted].mean()))


@jax.jit
def _compare(exact: Llama, changed: Llama, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """f32[B, R] and bool[B, R]"""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    one_sample = jnp.ones_like(tokens)
    p, q = (jax.nn.log_softmax(row_logits(model, tokens, positions, one_sample)) for model in (exact, changed))
    return jnp.sum(jnp.exp(p) * (p - q), axis=-1), jnp.argmax(p, axis=-1) == jnp.argmax(q, axis=-1)
