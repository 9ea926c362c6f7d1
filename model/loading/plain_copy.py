"""A copy of a served model in the form in which it is trained: on one device, and with its rows in one chip's order."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from model.config import LlamaConfig
from model.loading.hf_format import expected_shapes, sources
from model.loading.weights import fill_each
from model.network.linear import rows_of
from model.network.llama import Llama
from model.network.sharding import abstract_model


def plain_copy(model: Llama, config: LlamaConfig, *, dtype: Any) -> Llama:
    """The model on this process's first device, with arrays of its own, cast to `dtype`.

    Args:
        model: over any number of chips, and perhaps packed.
        config: the checkpoint's own, before any replication of KV heads.

    Raises:
        ValueError: the model is quantised: its weights are rounded.
    """
    if model.quantization is not None:
        raise ValueError(f"the weights are kept as {model.quantization}, which is too coarse to train from")
    shapes, stored = expected_shapes(config), nnx.to_flat_state(nnx.state(model))
    held = {".".join(map(str, path)): variable.get_value() for path, variable in stored}
    copies_of_heads = model.config.num_kv_heads // config.num_kv_heads

    def make(path: str, like: jax.ShapeDtypeStruct) -> jax.Array:
        parts = sources(path, config.family)
        copied = _plain(
            jax.device_put(held[path], like.sharding),
            rows=tuple(shapes[part.key][0] for part in parts),
            copies=tuple(copies_of_heads if part.is_kv else 1 for part in parts),
            groups=model.num_shards,
            head_dim=config.head_dim,
            dtype=like.dtype,
        )
        return jax.block_until_ready(copied)

    return fill_each(abstract_model(config, dtype=dtype), make)


@partial(jax.jit, static_argnames=("rows", "copies", "groups", "head_dim", "dtype"))
def _plain(
    kernel: jax.Array, *, rows: tuple[int, ...], copies: tuple[int, ...], groups: int, head_dim: int, dtype: Any
) -> jax.Array:
    """A parameter whose parts are one after the other.

    Args:
        kernel: has a group of rows for each chip, with the chip's rows of each part. It may be packed.
        rows: of each part.
        copies: how often each head of a part is stored.
    """
    if kernel.ndim == 3:
        kernel = rows_of(kernel, jnp.arange(sum(rows)))
    if groups > 1 and len(rows) > 1:
        stored = [size * times for size, times in zip(rows, copies, strict=True)]
        cut = jnp.split(kernel.reshape(groups, -1, kernel.shape[1]), np.cumsum(stored[:-1]) // groups, axis=1)
        heads = [
            part.reshape(-1, times, head_dim if times > 1 else 1, kernel.shape[1])[:, 0]
            for part, times in zip(cut, copies, strict=True)
        ]
        kernel = jnp.concatenate([part.reshape(-1, kernel.shape[1]) for part in heads])
    return jnp.copy(kernel).astype(dtype)  # a program may return an argument as it is: that would be no copy
