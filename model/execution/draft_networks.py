"""The networks that draft: a small model with the same vocabulary, and an EAGLE head.

A draft model reads the token at a position. The K/V of its accepted drafts are valid, so they stay. If a step accepted
all drafts, the draft model has not read the last draft, so the window has two positions.

At position p, a head reads the token at p + 1 and the model's features at p, which every step of the model keeps in the
pages. After a row's last token, it uses its own features instead. The K/V from its own features are not valid for later
steps, so after a step the head reads the accepted positions again: the window is as long as the tokens of a step.

The K/V of a page's last position depend on the first token of the next page. If requests share a prefix and differ from
the next page on, both use the K/V of one of them. A draft may then be wrong more often, but no output differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from model.eagle_config import EagleConfig
from model.execution.drafter import Drafter, Network
from model.execution.step import attend_in_pages, run_model
from model.network.eagle import EagleHead
from model.network.llama import Llama


@dataclass(frozen=True, kw_only=True)
class DraftModel(Drafter):
    """A draft model in the programs."""

    rebuild: Callable[[Any], Llama]  # the programs' weights -> the draft model

    ahead: ClassVar[int] = 0
    reads_features: ClassVar[bool] = False

    def network(self, weights: Any) -> Network:
        model = self.rebuild(weights)

        def run(
            tokens: jax.Array, positions: jax.Array, features: jax.Array | None, kv: list[jax.Array], metadata: Any
        ) -> tuple[jax.Array, list[jax.Array]]:
            assert features is None, "a draft model reads tokens only"
            hidden, kv, _ = run_model(model, tokens, positions, kv, [None] * len(kv), self.attention, metadata)
            return hidden, kv

        return Network(run=run, logits=model.logits)

    def window(self, most: int) -> int:
        return 2

    def read_of_drafts(self, num_accepted: jax.Array, num_drafts: jax.Array) -> jax.Array:
        return jnp.minimum(num_accepted, num_drafts - 1)


@dataclass(frozen=True, kw_only=True)
class EagleDrafts(Drafter):
    """An EAGLE head in the programs."""

    config: EagleConfig
    rebuild: Callable[[Any], EagleHead]  # the programs' weights -> the head
    rebuild_model: Callable[[Any], Llama]  # the programs' weights -> the model, whose parameters the head may share

    ahead: ClassVar[int] = 1
    reads_features: ClassVar[bool] = True

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.taps

    def network(self, weights: Any) -> Network:
        head, model = self.rebuild(weights), self.rebuild_model(weights)

        def run(
            tokens: jax.Array, positions: jax.Array, features: jax.Array | None, kv: list[jax.Array], metadata: Any
        ) -> tuple[jax.Array, list[jax.Array]]:
            assert features is not None, "a head reads features"
            (pages,) = kv
            attend = attend_in_pages(self.attention, metadata)
            hidden, pages = head(model, tokens, positions, features, (pages, None), attend)
            return hidden, [pages]

        return Network(run=run, logits=partial(head.logits, model), vocabulary=head.vocabulary)

    def window(self, most: int) -> int:
        return 1 + most

    def read_of_drafts(self, num_accepted: jax.Array, num_drafts: jax.Array) -> jax.Array:
        return jnp.zeros_like(num_accepted)

    def features(self, weights: Any, hidden: jax.Array, tapped: Sequence[jax.Array]) -> jax.Array:
        return self.rebuild(weights).features(hidden, tapped)
