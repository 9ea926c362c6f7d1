"""Persistent CTAs: as many as the chip runs at once, and each takes its units of work one after the other."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def rounds(units: jax.Array, num_ctas: int) -> jax.Array:
    """The number of rounds in which all units are taken. In the last round, some CTAs have no unit."""
    return lax.div(units + (num_ctas - 1), jnp.int32(num_ctas))


def unit_of(round_: Any, cta: jax.Array, num_ctas: int) -> jax.Array:
    """A CTA's unit in a round. Rounds alternate in direction: where the units are sorted, every CTA gets long and short
    ones."""
    place = jnp.where(lax.rem(round_, jnp.int32(2)) == 0, cta, num_ctas - 1 - cta)
    return round_ * num_ctas + place
