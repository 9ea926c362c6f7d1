"""Muon for the matrices, Adam for everything else.

Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) steps along the semi-orthogonal matrix that is nearest to
the momentum. With Muon a model of this size answers held-out sums after a training on about a million tokens of sums.
The whole demo can therefore be trained in well under an hour on two cores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # the quintic of the post above
NEWTON_SCHULZ_STEPS = 5

Arrays = dict[str, jax.Array]


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """
    Args:
        blocks: the parameters that Muon updates, each with the heights of the matrices that are stacked in it. Each
            matrix is orthogonalised separately.
        adam_rate: learning rate of all other parameters, as a fraction of the learning rate.
    """

    blocks: Mapping[str, tuple[int, ...]]
    momentum: float = 0.95
    adam_rate: float = 0.2
    adam_betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.01
    max_gradient_norm: float = 1.0

    def init(self, params: Arrays) -> dict[str, Arrays]:
        """The optimizer's state before the first step."""
        second = {name: jnp.zeros_like(p) for name, p in params.items() if name not in self.blocks}
        return {"first": jax.tree.map(jnp.zeros_like, params), "second": second}

    def update(
        self, params: Arrays, gradients: Arrays, state: dict[str, Arrays], step: jax.Array, learning_rate: jax.Array
    ) -> tuple[Arrays, dict[str, Arrays]]:
        """Parameters and state after step number `step` (from 0)."""
        norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in gradients.values()))
        clip = jnp.minimum(1.0, self.max_gradient_norm / (norm + 1e-9))
        new_params: Arrays = {}
        new_state: dict[str, Arrays] = {"first": {}, "second": {}}
        for name, param in params.items():
            gradient, first = gradients[name] * clip, state["first"][name]
            if name in self.blocks:
                first = self.momentum * first + gradient
                direction = self._orthogonal_blocks(gradient + self.momentum * first, self.blocks[name])
                shrink = 1.0 - learning_rate * self.weight_decay
                new_params[name] = param * shrink - learning_rate * direction
            else:
                first, second, direction = self._adam(gradient, first, state["second"][name], step)
                new_state["second"][name] = second
                new_params[name] = param - learning_rate * self.adam_rate * direction
            new_state["first"][name] = first
        return new_params, new_state

    def _orthogonal_blocks(self, matrix: jax.Array, heights: tuple[int, ...]) -> jax.Array:
        cuts = [sum(heights[:i]) for i in range(1, len(heights))]
        return jnp.concatenate([orthogonalised(block) for block in jnp.split(matrix, cuts)])

    def _adam(self, gradient: jax.Array, first: jax.Array, second: jax.Array, step: jax.Array) -> tuple[Any, Any, Any]:
        beta1, beta2 = self.adam_betas
        first = beta1 * first + (1 - beta1) * gradient
        second = beta2 * second + (1 - beta2) * gradient**2
        corrected = first / (1 - beta1 ** (step + 1.0))
        return first, second, corrected / (jnp.sqrt(second / (1 - beta2 ** (step + 1.0))) + 1e-8)


def orthogonalised(matrix: jax.Array) -> jax.Array:
    """An approximation of the semi-orthogonal matrix nearest to `matrix` [out, in] (singular values 0.7 to 1.2), times
    sqrt(max(1, out / in))."""
    rows, columns = matrix.shape
    x = matrix.T if rows > columns else matrix
    x = x / (jnp.linalg.norm(x) + 1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(NEWTON_SCHULZ_STEPS):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return (x.T if rows > columns else x) * max(1.0, rows / columns) ** 0.5
