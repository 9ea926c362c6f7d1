"""A model whose keys and values are rounded as 8-bit pages hold them, for measuring what that costs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from model.config import LlamaConfig
from model.execution.kv_range import measured_range
from model.network.layers import Attend
from model.network.llama import Llama
from pallas_kernels import quantised


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
