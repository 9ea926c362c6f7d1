"""Drafts from an EAGLE head.

At position p the head reads the model's features at p, which every step of the model keeps in the pages, and the token
at p + 1. After a row's last token it goes on with its own features. K/V made of these are not those of the text, so
after a step the head reads the accepted positions again: the window is as long as the tokens of a step.

The K/V of a page's last position are made with the next page's first token. If a prefix is shared and the texts part
there, those of one text serve for both: a draft may be wrong more often, and no output differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from model.eagle_config import EagleConfig
from model.execution.drafter import Drafter, Network
from model.execution.step import attend_in_pages
from model.network.eagle import DraftVocabulary, EagleHead
from model.network.llama import Llama
from pallas_kernels.api import PagedAttention


@dataclass(frozen=True, kw_only=True)
class EagleDrafts(Drafter):
    """The head as the programs run it."""

    config: EagleConfig
    rebuild: Callable[[Any], EagleHead]  # the programs' weights -> the head
    rebuild_model: Callable[[Any], Llama]  # the programs' weights -> the model, of which the head shares parts

    ahead: ClassVar[int] = 1
    reads_features: ClassVar[bool] = True

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.taps

    def network(self, weights: Any) -> Network:
        return _Head(self.rebuild(weights), self.rebuild_model(weights), self.attention)

    def window(self, most: int) -> int:
        return 1 + most

    def read_of_drafts(self, num_accepted: jax.Array, num_drafts: jax.Array) -> jax.Array:
        return jnp.zeros_like(num_accepted)

    def features(self, weights: Any, hidden: jax.Array, tapped: Sequence[jax.Array]) -> jax.Array:
        return self.rebuild(weights).features(hidden, tapped)


@dataclass(frozen=True)
class _Head:
    head: EagleHead
    model: Llama
    attention: PagedAttention

    @property
    def vocabulary(self) -> DraftVocabulary | None:
        return self.head.vocabulary

    def run(
        self, tokens: jax.Array, positions: jax.Array, features: jax.Array | None, kv: list[jax.Array], metadata: Any
    ) -> tuple[jax.Array, list[jax.Array]]:
        assert features is not None, "a head reads features"
        (pages,) = kv
        attend = attend_in_pages(self.attention, metadata)
        hidden, pages = self.head(self.model, tokens, positions, features, (pages, None), attend)
        return hidden, [pages]

    def logits(self, hidden: jax.Array) -> jax.Array:
        return self.head.logits(self.model, hidden)
