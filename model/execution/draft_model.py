"""Drafts from a small model with the same vocabulary.

At a position the draft model reads its token. The K/V of its accepted drafts are those of the text, so they stay. If a
step accepted all drafts, the draft model has not read the last one of them: the window has two positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from model.execution.drafter import Drafter, Network
from model.execution.step import forward
from model.network.llama import Llama
from pallas_kernels.api import PagedAttention


@dataclass(frozen=True, kw_only=True)
class DraftModel(Drafter):
    """The draft model as the programs run it."""

    rebuild: Callable[[Any], Llama]  # the programs' weights -> the draft model

    ahead: ClassVar[int] = 0
    reads_features: ClassVar[bool] = False

    def network(self, weights: Any) -> Network:
        return _Small(self.rebuild(weights), self.attention)

    def window(self, most: int) -> int:
        return 2

    def read_of_drafts(self, num_accepted: jax.Array, num_drafts: jax.Array) -> jax.Array:
        return jnp.minimum(num_accepted, num_drafts - 1)


@dataclass(frozen=True)
class _Small:
    model: Llama
    attention: PagedAttention
    vocabulary: None = None

    def run(
        self, tokens: jax.Array, positions: jax.Array, features: jax.Array | None, kv: list[jax.Array], metadata: Any
    ) -> tuple[jax.Array, list[jax.Array]]:
        assert features is None, "a draft model reads tokens only"
        return forward(self.model, tokens, positions, kv, [None] * len(kv), self.attention, metadata)

    def logits(self, hidden: jax.Array) -> jax.Array:
        return self.model.logits(hidden)
