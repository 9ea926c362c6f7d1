"""Parameters from outside: Hugging Face safetensors, read shard by shard, and random ones made where they will lie.

A parameter is filled by the tensors that `model.loading.hf_format` lists for it. Each chip's rows are read straight
from the file, put on the chip as they are, and joined there: the host never holds a whole model.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, Sharding

from model.config import LlamaConfig
from model.loading.hf_format import Source, sources
from model.loading.tensor_files import TensorFiles
from model.network.linear import INIT_STDDEV
from model.network.llama import Llama
from model.network.sharding import abstract_model, num_shards_of, sharding_of

MAX_PARAMETERS_IN_FLIGHT = 4  # read ahead while earlier ones are joined; bounds the host's memory


def load_hf(
    folder: Path | str,
    config: LlamaConfig,
    *,
    dtype: Any,
    mesh: Mesh | None = None,
    for_cpu: bool = False,
) -> Llama:
    """The checkpoint in `folder`, cast to `dtype`, in its stored form on `mesh`.

    Args:
        config: the checkpoint's own, before any replication of KV heads. Where it ties the head to the embedding and
            the files hold another head, the model gets that head.

    Raises:
        ValueError: files that are not whole, or tensors missing, unexpected, mis-shaped or of a type that cannot be
            cast: all of these in one message.
    """
    with TensorFiles(Path(folder)) as files:
        files.check(config)
        config = files.with_own_head(config)
        model = abstract_model(config, dtype=dtype, mesh=mesh, for_cpu=for_cpu)
        return fill(model, partial(_read_parameter, files=files, config=config, mesh=mesh))


def random_weights(
    config: LlamaConfig,
    *,
    dtype: Any,
    mesh: Mesh | None = None,
    for_cpu: bool = False,
    seed: int = 0,
) -> Llama:
    """Weights of the right shapes and sizes and no meaning, made on the chips at the speed of their memory."""
    model = abstract_model(config, dtype=dtype, mesh=mesh, for_cpu=for_cpu)
    seeds = np.random.default_rng(seed).integers(1 << 32, size=len(jax.tree.leaves(nnx.state(model))))
    remaining = iter(seeds.astype(np.uint32))

    def make(path: str, like: jax.ShapeDtypeStruct, axes: tuple[str, ...]) -> jax.Array:
        return _random(next(remaining), shape=like.shape, dtype=like.dtype, sharding=like.sharding)

    return fill(model, make, threads=1)


def fill(
    model: Llama,
    make: Callable[[str, jax.ShapeDtypeStruct, tuple[str, ...]], jax.Array],
    threads: int = MAX_PARAMETERS_IN_FLIGHT,
) -> Llama:
    """Replaces every abstract parameter by `make(path, abstract value, logical axes)`, several at a time."""
    graphdef, state = nnx.split(model)
    flat = list(nnx.to_flat_state(state))

    def one(item: tuple[tuple[Any, ...], nnx.Variable[Any]]) -> tuple[tuple[Any, ...], nnx.Variable[Any]]:
        path, variable = item
        name = ".".join(map(str, path))
        return path, variable.replace(make(name, variable.get_value(), variable.get_metadata("axes")))

    with ThreadPoolExecutor(threads) as pool:
        filled = list(pool.map(one, flat))
    return nnx.merge(graphdef, nnx.from_flat_state(filled))


def _read_parameter(
    path: str,
    like: jax.ShapeDtypeStruct,
    axes: tuple[str, ...],
    *,
    files: TensorFiles,
    config: LlamaConfig,
    mesh: Mesh | None,
) -> jax.Array:
    parts = sources(path)
    raw = [_read(files, part, config, num_shards_of(mesh), sharding_of(axes, mesh)) for part in parts]
    groups = num_shards_of(mesh) if len(parts) > 1 else 1
    array = _join(raw, groups=groups, dtype=like.dtype, sharding=like.sharding)
    # Waiting here keeps what is in flight to the few parameters that the pool works on.
    return jax.block_until_ready(array)


def _read(files: TensorFiles, source: Source, config: LlamaConfig, num_shards: int, sharding: Sharding) -> jax.Array:
    """The tensor as the file has it, each chip's part read by itself, KV heads repeated where chips outnumber them."""
    rows, *rest = files.shape(source.key)
    copies = max(1, num_shards // config.num_kv_heads) if source.is_kv else 1

    def read(index: tuple[slice, ...]) -> np.ndarray:
        if copies == 1:
            return files.read(source.key, index)
        start, stop, _ = index[0].indices(rows * copies)
        heads = np.arange(start, stop, config.head_dim) // (config.head_dim * copies)
        first, last = int(heads[0]), int(heads[-1])
        window = slice(first * config.head_dim, (last + 1) * config.head_dim)
        part = files.read(source.key, (window, *index[1:]))
        return part.reshape(last - first + 1, config.head_dim, -1)[heads - first].reshape(stop - start, -1)

    return jax.make_array_from_callback((rows * copies, *rest), sharding, read)


@partial(jax.jit, static_argnames=("groups", "dtype", "sharding"))
def _join(raw: list[jax.Array], *, groups: int, dtype: Any, sharding: Sharding) -> jax.Array:
    """[out, in] tensors, cut into one group per chip and joined group by group, as the rows of one."""
    joined = raw[0]
    if len(raw) > 1:
        cut = [part.reshape(groups, part.shape[0] // groups, part.shape[1]) for part in raw]
        joined = jnp.concatenate(cut, axis=1).reshape(-1, raw[0].shape[1])
    return jax.lax.with_sharding_constraint(joined.astype(dtype), sharding)


def _random(seed: np.uint32, *, shape: tuple[int, ...], dtype: Any, sharding: Sharding) -> jax.Array:
    make = _ones if len(shape) == 1 else _noise
    return jax.jit(make, static_argnames=("shape", "dtype"), out_shardings=sharding)(seed, shape=shape, dtype=dtype)


def _ones(seed: jax.Array, *, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jnp.ones(shape, dtype)


def _noise(seed: jax.Array, *, shape: tuple[int, int], dtype: Any) -> jax.Array:
    """Uniform noise of the usual spread: a hash of the element's number, so that any shard is made by itself."""
    row = jax.lax.broadcasted_iota(jnp.uint32, shape, 0)
    column = jax.lax.broadcasted_iota(jnp.uint32, shape, 1)
    x = (row * np.uint32(shape[1]) + column) ^ seed
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):  # the "lowbias32" mixer of C. Wellons
        x = (x ^ (x >> shift)) * np.uint32(factor)
    x = x ^ (x >> 16)
    unit = x.astype(jnp.float32) * np.float32(2.0**-31) - 1.0  # [-1, 1)
    return (unit * np.float32(INIT_STDDEV * 3**0.5)).astype(dtype)
