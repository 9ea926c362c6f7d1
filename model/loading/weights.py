"""Fills a model's parameters from a checkpoint, or with random values that are made on the chips.

`model.loading.hf_format` lists the tensors of each parameter. The rows for each chip are read from the file, copied to
the chip unchanged, and joined there. The host never holds a whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from jax.sharding import Mesh, Sharding

from model.config import LlamaConfig
from model.inputs.paths import Place, place
from model.loading.checkpoint import open_checkpoint
from model.loading.hf_format import Source, sources
from model.loading.tensors import Checkpoint, Reader
from model.network.linear import INIT_STDDEV, methods_of
from model.network.linear_method import LinearMethod, Unquantized
from model.network.llama import Llama
from model.network.sharding import abstract_model, num_shards_of
from model.quantization.forms import EightBit, WeightForm

MAX_PARAMETERS_IN_FLIGHT = 4  # parameters that are read and joined at the same time; bounds the host's memory


def load_hf(path: Place | str, config: LlamaConfig, *, mesh: Mesh | None = None, **form: Any) -> Llama:
    """Loads the checkpoint at `path`, a folder or a GGUF file, onto `mesh`. It is cast to `dtype` or quantised.

    Args:
        config: the checkpoint's own config, without repeated KV heads. If it ties the head to the embedding and the
            files hold another head, the model gets that head.
        form: the arguments `dtype`, `quantization` and `rounding` of `abstract_model`.

    Raises:
        ValueError: a file is incomplete, or tensors are missing, unexpected, mis-shaped or of a type that cannot be
            cast. One message lists all such tensors.
    """
    return load(open_checkpoint(place(path, "model"), config), mesh=mesh, **form)


def load(files: Checkpoint, *, mesh: Mesh | None = None, **form: Any) -> Llama:
    """Loads an open checkpoint onto `mesh`. `form`: as in `load_hf`. Raises ValueError if the files are damaged."""
    found = files.contents()
    model = abstract_model(found.config, mesh=mesh, **form)
    is_kept = model.quantization in (found.four_bit, found.exact_form)
    read = partial(read_source, files)
    filled = fill(model, module_reader(model, files, found.config, mesh, read, is_kept=is_kept))
    files.check_unchanged()
    return filled


def random_weights(config: LlamaConfig, *, seed: int = 0, **form: Any) -> Llama:
    """A model with random weights, which are made on the chips. `form`: arguments of `abstract_model`."""
    model = abstract_model(config, **form)
    seeds, methods = seeds_of(model, seed), methods_of(model)

    def make(path: str, likes: Described) -> Mapping[str, jax.Array]:
        first, *_ = [next(seeds) for _ in likes]
        made = random_values(first, likes=tuple(likes.items()), method=methods.get(path))
        return {name: _narrowed(value, likes[name]) for name, value in made.items()}

    return fill(model, make, threads=1)


def seeds_of(model: nnx.Module, seed: int) -> Iterator[np.uint32]:
    """A seed for each parameter of an abstract model."""
    seeds = np.random.default_rng(seed).integers(1 << 32, size=len(jax.tree.leaves(nnx.state(model))))
    return iter(seeds.astype(np.uint32))


Described = Mapping[str, jax.ShapeDtypeStruct]  # name -> shape, dtype and sharding of a module's own parameter
MakeModule = Callable[[str, Described], Mapping[str, jax.Array]]
# (tensor, the checkpoint's config, chips, sharding) -> the tensor
ReadSource = Callable[[Source, LlamaConfig, int, Sharding], jax.Array]


def described(model: nnx.Module) -> dict[str, Described]:
    """The parameters of each module of an abstract model, by its path."""
    modules: dict[str, dict[str, jax.ShapeDtypeStruct]] = {}
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        *module, name = map(str, path)
        modules.setdefault(".".join(module), {})[name] = variable.get_value()
    return dict(modules)


def fill[M: nnx.Module](model: M, make: MakeModule, threads: int = MAX_PARAMETERS_IN_FLIGHT) -> M:
    """Replaces every abstract parameter, several modules at a time.

    Args:
        make: (path of a module, its abstract parameters) -> their values, by name. Threads call it.
    """
    graphdef, state = nnx.split(model)
    modules = described(model)
    context = copy_context()  # threads inherit who expects programs to be compiled

    def made_by(*module: Any) -> Mapping[str, jax.Array]:
        return context.copy().run(make, *module)

    with ThreadPoolExecutor(threads) as pool:
        made = dict(zip(modules, pool.map(made_by, modules, modules.values()), strict=True))

    def value(path: tuple[Any, ...]) -> jax.Array:
        *module, name = map(str, path)
        return made[".".join(module)][name]

    filled = [(path, variable.replace(value(path))) for path, variable in nnx.to_flat_state(state)]
    return nnx.merge(graphdef, nnx.from_flat_state(filled))


def fill_each[M: nnx.Module](
    model: M,
    make: Callable[[str, jax.ShapeDtypeStruct], jax.Array],
    threads: int = MAX_PARAMETERS_IN_FLIGHT,
) -> M:
    """Replaces every abstract parameter, several modules at a time. `make(path, abstract value)` gives one of them."""

    def module(path: str, likes: Described) -> dict[str, jax.Array]:
        return {name: make(f"{path}.{name}" if path else name, like) for name, like in likes.items()}

    return fill(model, module, threads)


def module_reader(
    model: Llama,
    files: Checkpoint,
    config: LlamaConfig,
    mesh: Mesh | None,
    read: ReadSource,
    *,
    is_kept: bool = False,
) -> MakeModule:
    """A function for `fill` that reads the parameters of a module from an open checkpoint.

    Args:
        config: the checkpoint's own config, without repeated KV heads.
        read: reads one tensor of `files`, as `read_source` does.
        is_kept: kernels with scales of groups are read as they are stored.
    """
    methods, num_shards = methods_of(model), num_shards_of(mesh)

    def read_kept(name: str, like: jax.ShapeDtypeStruct, form: WeightForm, part: Source) -> jax.Array:
        """Reads a tensor of the parameter `name` of a kernel as it is stored."""
        shape = (files.shape(part.key)[0], like.shape[1])
        reader = files.kept_reader(name, part.key, form)
        return _read_rows(lambda rows: reader, shape, part, config, num_shards, like.sharding)

    def read_module(module: str, likes: Described) -> Mapping[str, jax.Array]:
        parts, likes = sources_of(module, likes, config), dict(likes)
        of_inputs = likes.pop("input_scale", None)
        name, like = next(iter(likes.items()))
        groups = num_shards if len(parts) > 1 else 1
        method = methods.get(module, Unquantized())
        if is_kept and (form := method.form) is not None and form.is_grouped:
            kept = {name: [read_kept(name, like, form, part) for part in parts] for name, like in likes.items()}
            return jax.block_until_ready({name: join_as(likes[name], raw, groups) for name, raw in kept.items()})
        raw = [read(part, config, num_shards, like.sharding) for part in parts]
        if method.form is not None:
            found = [(part, of_part) for part in parts if (of_part := files.scales(part.key)) is not None]
            values = _join_quantized(
                raw,
                [_with_copies(scales, part, config, num_shards) for part, (scales, _) in found],
                groups=groups,
                block=found[0][1][1] if found else None,
                method=method,
                shardings=tuple((name, like.sharding) for name, like in likes.items()),
            )
            values = {name: _narrowed(value, likes[name]) for name, value in values.items()}
        else:
            values = {name: join(raw, groups=groups, dtype=like.dtype, sharding=like.sharding)}
        if of_inputs is not None:  # fused projections have the same inputs: the largest scale is enough for all
            largest = max(files.input_scale(part.key) for part in parts)
            values["input_scale"] = jax.device_put(largest, of_inputs.sharding)
        # Waiting here limits the parameters in flight to the few that the pool works on.
        return jax.block_until_ready(values)

    return read_module


def sources_of(module: str, likes: Described, config: LlamaConfig) -> tuple[Source, ...]:
    """The tensors that fill a module's weights. Its other parameters, such as scales, follow from these tensors."""
    name = next(name for name in likes if name != "input_scale")
    return sources(f"{module}.{name}" if module else name, config.family)


def read_source(
    files: Checkpoint, source: Source, config: LlamaConfig, num_shards: int, sharding: Sharding
) -> jax.Array:
    """Reads a tensor in the file's dtype. Each chip's part is read separately. KV heads are repeated if there are more
    chips than heads."""
    return _read_rows(partial(files.reader, source.key), files.shape(source.key), source, config, num_shards, sharding)


def join_as(like: jax.ShapeDtypeStruct, raw: list[jax.Array], groups: int) -> jax.Array:
    """Joins the tensors of a parameter to one array with the dtype and sharding of `like`."""
    dtype = jnp.int8 if _is_narrowed_later(like.dtype, like.sharding) else like.dtype
    return _narrowed(join(raw, groups=groups, dtype=dtype, sharding=like.sharding), like)


def _is_narrowed_later(dtype: Any, sharding: Sharding) -> bool:
    """Whether a program returns int8 in place of int4. XLA's CPU backend converts to int4 one weight at a time. A copy
    by the host is seven times as fast."""
    return dtype == jnp.int4 and jax.default_backend() == "cpu" and sharding.is_fully_addressable


def _narrowed(value: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
    if value.dtype == like.dtype or value.dtype != jnp.int8:
        return value
    return jax.device_put(np.asarray(value).view(ml_dtypes.int4), like.sharding)


def _constrained(made: Mapping[str, jax.Array], shardings: Mapping[str, Sharding]) -> dict[str, jax.Array]:
    """The results of a program with their shardings. Some int4 results are int8, and are narrowed later."""
    leaving = {
        name: value.astype(jnp.int8) if _is_narrowed_later(value.dtype, shardings[name]) else value
        for name, value in made.items()
    }
    return jax.lax.with_sharding_constraint(leaving, dict(shardings))


def _read_rows(
    reader: Callable[[slice], Reader],
    shape: tuple[int, ...],
    source: Source,
    config: LlamaConfig,
    num_shards: int,
    sharding: Sharding,
) -> jax.Array:
    """Reads the rows that the chips of this host hold, with repeated KV heads. `reader` is called once."""
    rows, *rest = shape
    copies = copies_of(source, config, num_shards)
    shape = (rows * copies, *rest)

    def heads_of(index: tuple[slice, ...]) -> np.ndarray:
        """The stored head of each head in `index`, which counts repeated heads."""
        start, stop, _ = index[0].indices(rows * copies)
        return np.arange(start, stop, config.head_dim) // (config.head_dim * copies)

    def window_of(index: tuple[slice, ...]) -> slice:
        """The stored rows that this part of the array needs."""
        if copies == 1:
            start, stop, _ = index[0].indices(rows)
            return slice(start, stop)
        heads = heads_of(index)
        return slice(int(heads[0]) * config.head_dim, (int(heads[-1]) + 1) * config.head_dim)

    def part_of(index: tuple[slice, ...]) -> np.ndarray:
        window = window_of(index)
        part = stored((window, *index[1:]))
        if copies == 1:
            return part
        heads = heads_of(index)
        return part.reshape(-1, config.head_dim, part.shape[1])[heads - heads[0]].reshape(-1, part.shape[1])

    windows = [window_of(index) for index in sharding.addressable_devices_indices_map(shape).values() if index]
    here = slice(min(window.start for window in windows), max(window.stop for window in windows))
    stored = reader(here)
    return jax.make_array_from_callback(shape, sharding, part_of)  # type: ignore[arg-type]  # jax never passes None


def copies_of(source: Source, config: LlamaConfig, num_shards: int) -> int:
    """How many chips hold each head of a tensor; 1 if its rows are no KV heads."""
    return max(1, num_shards // config.num_kv_heads) if source.is_kv else 1


def _with_copies(scales: np.ndarray, source: Source, config: LlamaConfig, num_shards: int) -> np.ndarray:
    """The scales [out, n] of a kernel. Rows of KV heads are repeated as the kernel's are."""
    heads = scales.reshape(-1, config.head_dim if source.is_kv else 1, scales.shape[1])
    return np.repeat(heads, copies_of(source, config, num_shards), axis=0).reshape(-1, scales.shape[1])


@partial(jax.jit, static_argnames=("groups", "dtype", "sharding"))
def join(raw: list[jax.Array], *, groups: int, dtype: Any, sharding: Sharding) -> jax.Array:
    """Joins the tensors of a parameter and casts them. The first chip's rows of all tensors come first, then the second
    chip's, and so on."""
    return jax.lax.with_sharding_constraint(_joined(raw, groups).astype(dtype), sharding)


@partial(jax.jit, static_argnames=("groups", "block", "method", "shardings"))
def _join_quantized(
    raw: list[jax.Array],
    scales: Sequence[jax.Array | np.ndarray],
    *,
    groups: int,
    block: int | None,
    method: LinearMethod,
    shardings: tuple[tuple[str, Sharding], ...],
) -> dict[str, jax.Array]:
    """The parameters of a quantised projection, from weights, or from stored kernels and their scales f32[out, n].

    Kernels of the wanted form with one scale per row stay unchanged. Others are dequantised, and each row is quantised
    again. The values are the same for any number of chips.

    Args:
        scales: the scales of each of `raw`; empty if these are weights.
        block: the number of weights of a row that share a scale; None: all of them.
        shardings: the name and the sharding of each parameter.
    """
    if not scales:
        made = method.quantize(_joined(raw, groups))
    elif block is None and isinstance(method.form, EightBit) and raw[0].dtype == method.form.dtype:
        made = {"kernel": _joined(raw, groups), "scale": _joined(scales, groups)[:, 0]}
    else:
        weights = [_dequantized(kernel, scale, block) for kernel, scale in zip(raw, scales, strict=True)]
        made = method.quantize(_joined(weights, groups))
    return _constrained(made, dict(shardings))


def _dequantized(kernel: jax.Array, scales: jax.Array | np.ndarray, block: int | None) -> jax.Array:
    """The weights f32[out, in] of a kernel with scales [out, n]."""
    if block is not None:
        scales = scales[:, np.arange(kernel.shape[1]) // block]
    return kernel.astype(jnp.float32) * scales


def _joined(raw: Sequence[jax.Array | np.ndarray], groups: int) -> jax.Array:
    """Cuts tensors into one group of rows per chip and joins them group by group along the rows."""
    if len(raw) == 1:
        return jnp.asarray(raw[0])
    cut = [part.reshape(groups, part.shape[0] // groups, *part.shape[1:]) for part in raw]
    return jnp.concatenate(cut, axis=1).reshape(-1, *raw[0].shape[1:])


@partial(jax.jit, static_argnames=("likes", "method"))
def random_values(
    seed: jax.Array, *, likes: tuple[tuple[str, jax.ShapeDtypeStruct], ...], method: LinearMethod | None = None
) -> dict[str, jax.Array]:
    """Noise for a matrix, ones for a norm, quantised noise for a kernel with a scale."""
    name, like = likes[0]
    if len(like.shape) == 1:
        made = {name: jnp.ones(like.shape, like.dtype)}
    elif method is None or method.form is None:
        made = {name: _noise(seed, like.shape).astype(like.dtype)}
    else:
        made = method.quantize(_noise(seed, like.shape))
    return _constrained(made, {name: like.sharding for name, like in likes})


def _noise(seed: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Uniform noise of standard deviation INIT_STDDEV. Each value hashes its index: a shard needs no other shard."""
    row = jax.lax.broadcasted_iota(jnp.uint32, shape, 0)
    column = jax.lax.broadcasted_iota(jnp.uint32, shape, 1)
    x = (row * np.uint32(shape[1]) + column) ^ seed
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):  # the "lowbias32" mixer of C. Wellons
        x = (x ^ (x >> shift)) * np.uint32(factor)
    x = x ^ (x >> 16)
    unit = x.astype(jnp.float32) * np.float32(2.0**-31) - 1.0  # [-1, 1)
    return unit * np.float32(INIT_STDDEV * 3**0.5)
