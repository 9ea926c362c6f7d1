"""Sharding: one mesh axis, the table that maps logical axes to it, and the model's stored form on a mesh."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from model.config import LlamaConfig
from model.eagle_config import NUM_TAPS, EagleConfig
from model.network.eagle import EagleHead
from model.network.llama import Llama
from model.quantization.forms import Rounding, WeightForm

TENSOR_AXIS = "tensor"

# Logical axis -> mesh axis. In each half of a layer the first product is split by outputs, and the second by inputs:
# a layer needs two all-reduces and no other exchange.
# The vocabulary is split in the embedding (one all-reduce of [T, D]) and in the head. Logits and token histories stay
# on their chips: tokens are drawn from parts (`model.sampling.vocab_split`).
RULES: dict[str, str | None] = {
    "vocab": TENSOR_AXIS,
    "heads": TENSOR_AXIS,
    "mlp": TENSOR_AXIS,
    "embed": None,
    "rows": None,
}


def make_mesh(num_shards: int, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of the first `num_shards` devices. JAX orders them by their links."""
    devices = jax.devices() if devices is None else devices
    if not 1 <= num_shards <= len(devices):
        raise ValueError(f"{num_shards=} chips are asked for, {len(devices)} are there")
    return jax.make_mesh((num_shards,), (TENSOR_AXIS,), devices=devices[:num_shards], axis_types=(AxisType.Auto,))


def num_shards_of(mesh: Mesh | AbstractMesh | None) -> int:
    """The number of chips over which the heads are split; 1 without a mesh."""
    return 1 if mesh is None else mesh.shape[TENSOR_AXIS]


def partition(axes: Sequence[str]) -> P:
    """The PartitionSpec of these logical axes, without trailing Nones: P('x') and P('x', None) would compile twice."""
    entries = [RULES[axis] for axis in axes]
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries)


def sharding_of(axes: Sequence[str], mesh: Mesh | AbstractMesh | None) -> Sharding:
    """The sharding of an array with these logical axes; without a mesh, the default device."""
    if mesh is None:
        return SingleDeviceSharding(jax.devices()[0])
    return NamedSharding(mesh, partition(axes))


def stored_config(config: LlamaConfig, num_shards: int) -> LlamaConfig:
    """The config with KV heads repeated if there are more chips than KV heads. Each chip then has one KV head.

    The queries of a repeated head are split among its copies. The results stay the same; only K/V memory grows.

    Raises:
        ValueError: heads, MLP or vocabulary do not divide over the chips. The message lists every such size.
    """
    kv_heads = config.num_kv_heads
    if kv_heads < num_shards and num_shards % kv_heads == 0:
        kv_heads = num_shards
    sizes = {
        "num_heads": config.num_heads,
        "num_kv_heads": kv_heads,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
    }
    problems = [f"{name}={size}" for name, size in sizes.items() if size % num_shards]
    if problems:
        raise ValueError(f"the model does not divide over {num_shards=} chips: " + ", ".join(problems))
    return replace(config, num_kv_heads=kv_heads)


def check_groups(config: LlamaConfig, form: WeightForm, num_shards: int) -> None:
    """Raises ValueError if the inputs of a kernel on one chip are no whole groups. The second product in each half of a
    layer is split by inputs, because its outputs are summed over the chips."""
    hidden, attended, mlp = config.projection_inputs
    inputs = {"hidden_size": hidden, "num_heads * head_dim": attended // num_shards}
    inputs["intermediate_size"] = mlp // num_shards
    cut = [f"{name}: {size} inputs on each" for name, size in inputs.items() if size % form.whole]
    if cut:
        raise ValueError(
            f"{form.in_words()}: {num_shards} chip(s) would not hold whole groups ({'; '.join(cut)}): use another "
            f"--tensor-parallel-size, or --quantization int8"
        )


def abstract_model(
    config: LlamaConfig,
    *,
    dtype: Any,
    mesh: Mesh | AbstractMesh | None = None,
    quantization: WeightForm | None = None,
    rounding: Rounding | None = None,
) -> Llama:
    """The model in its stored form on `mesh`. Every parameter is a ShapeDtypeStruct with its sharding.

    Programs can be compiled from it before the weights are loaded.

    Raises:
        ValueError: sizes do not divide over the chips, or a group of weights that share a scale would be split.
    """
    num_shards = num_shards_of(mesh)
    stored = stored_config(config, num_shards)
    if quantization is not None:
        check_groups(config, quantization, num_shards)
    form = {"quantization": quantization, "rounding": rounding}
    return _abstract(Llama, stored, mesh, dtype=jnp.dtype(dtype), num_shards=num_shards, **form)


def abstract_head(
    config: EagleConfig,
    *,
    dtype: Any,
    mesh: Mesh | AbstractMesh | None = None,
    has_embedding: bool = False,
) -> EagleHead:
    """An EAGLE head in its stored form on `mesh`. Every parameter is a ShapeDtypeStruct with its sharding. Raises
    ValueError if the head does not divide over the chips."""
    num_shards = num_shards_of(mesh)
    if (NUM_TAPS * config.model_width) % num_shards or config.draft_vocab_size % num_shards:
        sizes = f"width {config.model_width} and draft_vocab_size {config.draft_vocab_size}"
        raise ValueError(f"the {config.form} head does not divide over {num_shards=} chips: {sizes}")
    stored = replace(config, layer=stored_config(config.layer, num_shards))
    form = {"dtype": jnp.dtype(dtype), "num_shards": num_shards, "has_embedding": has_embedding}
    return _abstract(EagleHead, stored, mesh, **form)


def _abstract[M: nnx.Module](
    module: Callable[..., M], config: LlamaConfig | EagleConfig, mesh: Mesh | AbstractMesh | None, **form: Hashable
) -> M:
    graphdef, variables = _shapes(module, config, **form)
    placed = [(path, variable.replace(_placed(variable, mesh))) for path, variable in variables]
    return nnx.merge(graphdef, nnx.from_flat_state(placed))


@lru_cache(maxsize=8)  # a start needs a model's shapes up to three times: 0.2 s for 32 layers
def _shapes[M: nnx.Module](
    module: Callable[..., M], config: LlamaConfig | EagleConfig, **form: Hashable
) -> tuple[nnx.GraphDef[M], Sequence[tuple[Any, nnx.Variable[Any]]]]:
    graphdef, state = nnx.split(nnx.eval_shape(lambda: module(config, rngs=None, **form)))
    return graphdef, nnx.to_flat_state(state)


def _placed(variable: nnx.Variable[Any], mesh: Mesh | AbstractMesh | None) -> jax.ShapeDtypeStruct:
    value = variable.get_value()
    sharding = sharding_of(variable.get_metadata("axes"), mesh)
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
