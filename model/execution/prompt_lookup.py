"""Prompt lookup: the last few tokens are searched earlier in the text, and the tokens that followed there are drafts.

It needs no weights. Its drafts are right where a text repeats its own parts: code, edits, quotes of the prompt, lists.

Shape legend: `S` rows of the step, `L` tokens of a text (padded), `D` drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True, kw_only=True)
class PromptLookup:
    """The limits for the number of last tokens that must match."""

    min_tokens: int
    max_tokens: int

    def __post_init__(self) -> None:
        if not 1 <= self.min_tokens <= self.max_tokens:
            raise ValueError(f"at least one token is looked up: {self.min_tokens=} {self.max_tokens=}")


def propose(text: jax.Array, ends: jax.Array, num_drafts: int, lookup: PromptLookup) -> tuple[jax.Array, jax.Array]:
    """The drafts i32[S, D] for each text, and whether there are any, bool[S].

    The match with the most tokens is taken; if there are several, the last one. If the text ends within the drafts, it
    is assumed to repeat with that period: after `a b a b` the drafts are `a b a`.

    Args:
        text: i32[S, L].
        ends: i32[S], the index of each text's last token.
    """
    length = text.shape[1]
    index = jnp.arange(length, dtype=jnp.int32)
    matches = index < ends[:, None]
    num_matched = jnp.zeros(text.shape, jnp.int32)
    for back in range(lookup.max_tokens):
        wanted = jnp.take_along_axis(text, jnp.maximum(ends - back, 0)[:, None], axis=1)
        earlier = jnp.pad(text[:, : length - back], ((0, 0), (back, 0)), constant_values=-1)
        matches &= (earlier == wanted) & (ends >= back)[:, None]
        num_matched += matches
    score = jnp.where(num_matched >= lookup.min_tokens, num_matched * length + index, -1)
    best = jnp.max(score, axis=1)
    place = jnp.maximum(best, 0) % length
    step = jnp.arange(num_drafts, dtype=jnp.int32) % jnp.maximum(ends - place, 1)[:, None]
    following = jnp.minimum(place[:, None] + 1 + step, length - 1)
    return jnp.take_along_axis(text, following, axis=1), best >= 0
