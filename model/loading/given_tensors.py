"""Weights that a trainer gives as arrays, in place of files.

JAX arrays are copied from their devices to the chips, without the host. NumPy arrays are read as files are. All arrays
are checked before the first of them is used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from flax.core.meta import Partitioned
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from model.config import LlamaConfig
from model.loading import trainer_layouts
from model.loading.hf_format import EMBEDDING, HEAD, IGNORED, Source, expected_shapes
from model.loading.tensor_files import DTYPES, by_message, grouped
from model.loading.tensors import Checkpoint, Reader
from model.loading.trainer_layouts import Array, Cut, Layout
from model.loading.weights import Described, copies_of, described, module_reader, read_source, sources_of
from model.network.linear import methods_of
from model.network.linear_method import LinearMethod
from model.network.sharding import abstract_model

Names = Literal["hf", "own", "tunix", "maxtext"]
_LAYOUTS: dict[str, Callable[[LlamaConfig, Mapping[str, Any]], Layout]] = {
    "hf": lambda config, _: trainer_layouts.hugging_face(config),
    "own": lambda config, _: trainer_layouts.own(config),
    "tunix": lambda config, _: trainer_layouts.tunix(config),
    "maxtext": trainer_layouts.maxtext,
}
_OUTER = ("params", "base", "model")  # collections and wrappers around the arrays of MaxText and Tunix
_LARGEST = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)  # a greater float32 becomes infinite in bfloat16
_OF_A_LAYER = re.compile(r"layers\.\d+\.")
_BYTES_AT_ONCE = 64 << 20  # bytes of a NumPy array that are checked together; bounds the device's memory


class GivenWeights(Checkpoint):
    """The weights of a trainer, for a model that serves.

    Args:
        arrays: a mapping from names to arrays, nested or not, or a module of Flax NNX or its state. The weights in a
            state are its `nnx.Param`. Arrays may be on any devices of this process.
        config: the config of the model. Its fields for quantised files are ignored.
        names: the layout, which gives the names and shapes. "hf": Hugging Face's. "own": that of `Llama` on one chip.
            "tunix", "maxtext": those of these trainers. Paths may begin with "params", "base" or "model".
        donate: deletes each array once it is no longer needed. Without it the arrays stay as they are.

    Raises:
        ValueError: `names` is none of these.
    """

    def __init__(self, arrays: Any, config: LlamaConfig, *, names: Names = "hf", donate: bool = False) -> None:
        if names not in _LAYOUTS:
            raise ValueError(f"names={names!r} is not one of {', '.join(_LAYOUTS)}")
        self.config = replace(config, quantized=None)
        self._donate = donate
        self._arrays = flattened(arrays)  # name in the layout -> array
        if names not in ("hf", "own"):
            self._arrays = {_inner(path): array for path, array in self._arrays.items()}
        layout = _LAYOUTS[names](self.config, self._arrays)
        self._shapes, self._pieces = dict(layout.shapes), dict(layout.pieces)
        self._tensor_shapes = expected_shapes(replace(self.config, tie_word_embeddings=False))
        self._have_good_values = False
        if config.tie_word_embeddings:
            self._tie()

    def check(self, form: Mapping[str, Any]) -> None:
        """Checks the arrays. It waits for their values, and changes nothing. Values are checked only once.

        Args:
            form: the arguments of `abstract_model`.

        Raises:
            ValueError: the weights cannot have this form. Or arrays are missing, unexpected, mis-shaped, of a type that
                cannot be cast, deleted, partly on other hosts, not finite, or too large for bfloat16. One message lists
                all of them.
        """
        missing, extra = self._shapes.keys() - self._arrays.keys(), self._arrays.keys() - self._shapes.keys()
        extra = {path for path in extra if not IGNORED.fullmatch(path)}
        problems = [f"missing: {grouped(missing)}"] if missing else []
        problems += [f"unexpected: {grouped(extra)}"] if extra else []
        found = [(fault, path) for path in self._shapes.keys() - missing if (fault := self._fault(path))]
        problems += by_message(found)
        if not problems and not self._have_good_values and self._has_another_head():
            problems.append(f"{self._pieces[HEAD.key].path} differs from the embedding, and the model ties them")
        if problems:
            raise ValueError("the arrays are not this model's weights: " + "; ".join(problems))
        self._have_good_values = True
        if form["rounding"] is not None and form["rounding"].is_static:
            raise ValueError(
                "the inputs of the projections are rounded with scales that the checkpoint stores, and the arrays have "
                "none: start the engine with a checkpoint that is not quantised"
            )

    def modules(
        self, form: Mapping[str, Any], *, rehearses: bool = False
    ) -> Iterator[tuple[str, Mapping[str, jax.Array]]]:
        """The path of each module of the model, and its parameters in this form. They are new arrays, which are made
        when the iterator reaches the module.

        Args:
            form: the arguments of `abstract_model`.
            rehearses: gives only one module of each kind and form, and deletes no array.

        Raises:
            ValueError: `check` fails. It runs before the first module.
        """
        self.check(form)
        model = abstract_model(self.config, **form)
        modules = described(model)
        make = module_reader(model, self, self.config, form["mesh"], self._read)
        if rehearses:
            methods, rehearsed = methods_of(model), set[tuple[str, LinearMethod | None]]()
            for module, likes in modules.items():
                kind = _OF_A_LAYER.sub("", module), methods.get(module)
                if kind not in rehearsed:
                    rehearsed.add(kind)
                    yield module, make(module, likes)
            return
        last = self._last_users(modules)
        for module, likes in modules.items():
            yield module, make(module, likes)
            for path in last.pop(module, ()) if self._donate else ():
                array = self._arrays.pop(path)
                if isinstance(array, jax.Array):
                    array.delete()
                del array  # frees a NumPy array before the next module is made

    def _last_users(self, modules: Mapping[str, Described]) -> dict[str, list[str]]:
        """Module -> the names of the arrays that no later module needs. The last module has those that none needs."""
        identities = {path: id(array) for path, array in self._arrays.items()}  # names of one array have the same
        last: dict[int, str] = {}
        for module, likes in modules.items():
            last |= dict.fromkeys(
                (identities[self._pieces[part.key].path] for part in sources_of(module, likes, self.config)), module
            )
        *_, end = modules
        users: dict[str, list[str]] = {module: [] for module in modules}
        for path, identity in identities.items():
            users[last.get(identity, end)].append(path)
        return users

    def _read(self, source: Source, config: LlamaConfig, num_shards: int, sharding: Sharding) -> jax.Array:
        """Reads a tensor in the array's dtype, with this sharding. KV heads are repeated if there are more chips."""
        tensor = self._tensor(source.key)
        if not isinstance(tensor, jax.Array):
            return read_source(self, source, config, num_shards, sharding)
        if (copies := copies_of(source, config, num_shards)) == 1:
            return moved(tensor, sharding)
        assert isinstance(sharding, NamedSharding)
        everywhere = moved(tensor, NamedSharding(sharding.mesh, P()))
        return _repeated(everywhere, copies=copies, head_dim=config.head_dim, sharding=sharding)

    def shape(self, key: str) -> tuple[int, ...]:
        return self._tensor_shapes[key]

    def reader(self, key: str, rows: slice) -> Reader:
        tensor: Any = self._tensor(key)
        reader: Reader = tensor.__getitem__
        return reader

    def _tie(self) -> None:
        """If the embedding and the head are tied, either of them may be left out."""
        embedding = self._pieces[EMBEDDING.key]
        head = self._pieces.setdefault(HEAD.key, embedding)
        if head.path != embedding.path and head.path not in self._arrays:
            del self._shapes[head.path]
            self._pieces[HEAD.key] = embedding
        elif head.path != embedding.path and embedding.path not in self._arrays:
            del self._shapes[embedding.path]
            self._pieces[EMBEDDING.key] = head

    def _fault(self, path: str) -> str | None:
        """What is wrong with an array, in words that follow its name; None if it is right."""
        array: Any = self._arrays[path]
        shape = self._shapes[path]
        if not isinstance(array, jax.Array | np.ndarray):
            return f"is a {type(array).__name__} and no array"
        if array.shape != shape:
            vocab = self.config.vocab_size
            is_of_vocab = path in (self._pieces[EMBEDDING.key].path, self._pieces[HEAD.key].path)
            words = f": the vocabulary has {vocab} tokens" if is_of_vocab and vocab not in array.shape else ""
            return f"has shape {array.shape}, not {shape}{words}"
        if array.dtype.name not in DTYPES.values():
            return f"has type {array.dtype}, not one of {', '.join(DTYPES.values())}"
        if isinstance(array, jax.Array) and array.is_deleted():
            return "has been deleted, as by a step to which it was donated"
        if isinstance(array, jax.Array) and not array.is_fully_addressable:
            return "has parts that other hosts hold"
        if not self._have_good_values and not all(_is_finite(part) for part in _parts(array)):
            return "is not finite, or too large for bfloat16"
        return None

    def _has_another_head(self) -> bool:
        """Whether the model ties the head to the embedding, but both were given and differ."""
        if not self.config.tie_word_embeddings or self._pieces[HEAD.key].path == self._pieces[EMBEDDING.key].path:
            return False
        head, embedding = (self._tensor(source.key) for source in (HEAD, EMBEDDING))
        if isinstance(head, jax.Array) and isinstance(embedding, jax.Array):
            return not _are_equal(moved(head, embedding.sharding), embedding)
        both = map(_parts, (np.asarray(head), np.asarray(embedding)))
        return not all(_are_equal(*parts) for parts in zip(*both, strict=True))

    def _tensor(self, key: str) -> Array:
        """The tensor with this name, in Hugging Face's form."""
        piece = self._pieces[key]
        array = self._arrays[piece.path]
        if isinstance(array, np.ndarray):
            tensor: np.ndarray = piece.cut.of(array, piece.layer)
            return tensor
        array = _automatic(array)
        return array if piece.cut == Cut() else _cut_on_devices(array, piece.layer, cut=piece.cut)


def flattened(tree: Any) -> dict[str, Any]:
    """The leaves of a tree that `GivenWeights` accepts, by paths such as "layers.0.mlp.down.kernel"."""
    return dict(_leaves(nnx.state(tree) if isinstance(tree, nnx.Module) else tree, ()))


def _leaves(node: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """The leaves below `node`, with their paths. A recursive closure would be a reference cycle, which keeps the arrays
    alive until the next full collection."""
    if isinstance(node, Mapping):
        for key, child in node.items():
            yield from _leaves(child, (*path, *map(str, key if isinstance(key, tuple) else (key,))))
    elif isinstance(node, list | tuple):
        for key, child in enumerate(node):
            yield from _leaves(child, (*path, str(key)))
    elif not isinstance(node, nnx.Variable):
        yield ".".join(path), node.value if isinstance(node, Partitioned) else node
    elif isinstance(node, nnx.Param):
        yield ".".join(path), node.get_value()


def _inner(path: str) -> str:
    """The path without the wrappers (`_OUTER`) that a trainer may have put around its arrays."""
    outer, _, inner = path.partition(".")
    return _inner(inner) if outer in _OUTER and inner else path


def _automatic(array: jax.Array) -> jax.Array:
    """The same array on a mesh whose axes are all automatic. Programs that mix arrays with explicit axes and the
    engine's arrays would not compile."""
    if not isinstance(array.sharding, NamedSharding):
        return array
    mesh = array.sharding.mesh
    if all(kind is AxisType.Auto for kind in mesh.axis_types):
        return array
    sharding = NamedSharding(Mesh(mesh.devices, mesh.axis_names), array.sharding.spec)
    parts = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, parts)


def moved(array: jax.Array, sharding: Sharding) -> jax.Array:
    """Copies the array to the devices of `sharding`, from device to device. `jax.device_put` alone would copy through
    the host if a sharded array is to be split in another way."""
    here = array.sharding
    if here.is_equivalent_to(sharding, array.ndim):
        return array
    if isinstance(here, NamedSharding):
        if isinstance(sharding, NamedSharding) and [*here.mesh.devices.flat] == [*sharding.mesh.devices.flat]:
            return _resharded(array, sharding=sharding)
        array = _resharded(array, sharding=NamedSharding(here.mesh, P())).addressable_data(0)
    return jax.device_put(array, sharding)


@partial(jax.jit, static_argnames="sharding")
def _resharded(array: jax.Array, *, sharding: Sharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(array, sharding)


@partial(jax.jit, static_argnames=("copies", "head_dim", "sharding"))
def _repeated(array: jax.Array, *, copies: int, head_dim: int, sharding: Sharding) -> jax.Array:
    heads = array.reshape(-1, head_dim, array.shape[1])
    repeated = jnp.repeat(heads, copies, axis=0).reshape(-1, array.shape[1])
    return jax.lax.with_sharding_constraint(repeated, sharding)


@partial(jax.jit, static_argnames="cut")
def _cut_on_devices(array: jax.Array, layer: int, *, cut: Cut) -> jax.Array:
    """The tensor that `cut` makes of the array. All layers use the same program."""
    tensor: jax.Array = cut.of(array, layer)
    return tensor


@jax.jit
def _is_finite(array: jax.Array) -> jax.Array:
    """Whether all values are finite, also after a cast to bfloat16."""
    return jnp.all(jnp.abs(array.astype(jnp.float32)) <= _LARGEST)


@jax.jit
def _are_equal(one: jax.Array, other: jax.Array) -> jax.Array:
    return jnp.array_equal(one.astype(jnp.float32), other.astype(jnp.float32))


def _parts(array: Array) -> Iterator[jax.Array]:
    """A JAX array as a whole, or a NumPy array in JAX arrays of bounded size.

    A compiled function would keep a NumPy argument alive until JAX is called again, and with it all received data.
    """
    if isinstance(array, jax.Array):
        yield array
        return
    rows = max(1, _BYTES_AT_ONCE // max(1, array[:1].nbytes))
    for start in range(0, len(array), rows):
        yield jnp.asarray(array[start : start + rows])
