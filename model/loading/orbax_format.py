"""The stored form of a model: a checkpoint of Orbax, and one JSON file with what Orbax cannot hold.

Orbax's tree has one array for each parameter, under the parameter's name. The tensors of fused projections are arrays
of their own (`layers.0.attention.qkv.k_proj.kernel`): how the rows of a fused projection lie depends on the number of
chips. Each chip gets its rows or columns of every tensor, and joins them.

Orbax writes the arrays and its users can open them. TensorStore, the library under Orbax, reads them here: a failed
restore by Orbax drops the reads in flight, whose coroutines then print tracebacks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, Literal, Self

import jax
import msgspec
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from model.config import LlamaConfig
from model.inputs.json_file import check_is_file, read_object
from model.inputs.paths import Place, place, write_whole
from model.inputs.remote import GCS, RemotePath
from model.loading.hf_format import Source, expected_shapes, module_of, parameter_of, sources
from model.loading.source import CONVERSION_FILE
from model.loading.tensors import Checkpoint, Contents, Reader
from model.network.llama import Llama
from model.network.sharding import TENSOR_AXIS, make_mesh, partition
from model.quantization.forms import Activations, EightBit, WeightForm, form_named

FORMAT = 8
_ARRAYS = "arrays"
_DRIVERS = {GCS: "gcs", "s3": "s3"}  # of TensorStore, by the schemes of URLs
_INDEX_CACHE_BYTES = 100 << 20  # of TensorStore, for the tables that locate arrays in its files


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """`stored.json`: the model that was converted."""

    dtype: Literal["bfloat16", "float32"]  # of the parameters that are not quantised
    config: dict[str, Any]  # the fields that identify the model, as in `config.json`
    quantization: str | None = None  # of the projections and the head, as `forms.form_named` reads it
    activations: Activations | None = None  # what a quantised checkpoint said of the inputs of its projections
    kv_ranges: list[list[list[float]]] | None = None  # [L, 2, K], see `kv_ranges.read_kv_ranges`

    @classmethod
    def read(cls, folder: Place, config: LlamaConfig) -> Self:
        """Raises ValueError if the conversion is unfinished, damaged, or of another format or another model."""
        path = folder / CONVERSION_FILE
        if not path.exists():
            raise ValueError(f"{folder} holds no finished conversion ({CONVERSION_FILE} is missing): convert again")
        try:
            raw = read_object(path)
        except ValueError as error:
            raise ValueError(f"{error}: convert again") from error
        if raw.get("format") != FORMAT:
            raise ValueError(f"{path} has format {raw.get('format')}, this version reads {FORMAT}: convert again")
        try:
            found, expected = msgspec.convert(raw, cls), _identity(config)
            differing = ", ".join(key for key, value in found.config.items() if expected.get(key) != value)
            if not differing:
                found.form(config)
                found.ranges(config)
        except ValueError as error:
            raise ValueError(f"{path} is damaged: convert again ({error})") from error
        if differing:
            raise ValueError(
                f"{folder} holds another model than the config next to it ({differing} differ): convert again"
            )
        return found

    def write(self, folder: Place) -> None:
        content = {"format": FORMAT} | msgspec.to_builtins(self)
        write_whole(folder / CONVERSION_FILE, (json.dumps(content, indent=2) + "\n").encode())

    def form(self, config: LlamaConfig) -> WeightForm | None:
        """The form of the weights that `quantization` names; None if they are not quantised."""
        return form_named(self.quantization, config.projection_inputs) if self.quantization else None

    def ranges(self, config: LlamaConfig) -> np.ndarray | None:
        """The ranges of keys and values, f32[L, 2, K]; None if there are none."""
        if self.kv_ranges is None:
            return None
        sizes = {tuple(map(len, layer)) for layer in self.kv_ranges}
        found = np.array(self.kv_ranges, np.float32) if sizes == {(config.num_kv_heads,) * 2} else np.zeros(0)
        if len(found) != config.num_layers or not (np.isfinite(found) & (found > 0)).all():
            raise ValueError("kv_ranges must be positive numbers, two for each KV head of each layer")
        return found


def save_orbax(
    model: Llama,
    folder: Place | str,
    config: LlamaConfig,
    kv_ranges: np.ndarray | None = None,
    activations: Activations | None = None,
) -> None:
    """Writes the stored form of a model on one chip to `folder`. Any number of chips can load it. Nothing is
    overwritten.

    Args:
        config: the checkpoint's own.
        kv_ranges: see `kv_ranges.read_kv_ranges`.
        activations: of a checkpoint that was quantised. If they are static, the model has the scales.
    """
    if model.num_shards != 1:
        raise ValueError(f"only a model on one chip can be stored: {model.num_shards=}")
    folder = _absolute(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shapes, arrays, options = expected_shapes(config), {}, {}
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        value, axes = np.asarray(variable.get_value()), variable.get_metadata("axes")
        parts = _parts(".".join(map(str, path)), config)
        ends = np.cumsum([shapes[part.key][0] for part in parts.values() if part is not None])
        tensors = np.split(value, ends[:-1]) if len(parts) > 1 else [value]
        for (name, part), tensor in zip(parts.items(), tensors, strict=True):
            arrays[name], options[name] = _in_chunks(tensor, partition(axes), config, part)
    # Weights do not compress; trying costs most of the time of a restore.
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False)) as checkpointer:
        checkpointer.save(str(folder / _ARRAYS), args=ocp.args.PyTreeSave(arrays, save_args=options))
    description = Description(
        dtype=model.dtype.name,
        config=_identity(config),
        quantization=None if model.quantization is None else str(model.quantization),
        activations=activations,
        kv_ranges=None if kv_ranges is None else kv_ranges.tolist(),
    )
    description.write(folder)  # last: a folder without it is unfinished


class OrbaxFiles(Checkpoint):
    """The arrays that `save_orbax` wrote, under the names of a checkpoint's tensors. An array is read in parts, so a
    host reads only what its chips hold.

    Raises:
        ValueError: the folder is unfinished or damaged, or holds another model or another format. By a reader, if an
            array is damaged. A changed weight is not found.
    """

    def __init__(self, folder: Place | str, config: LlamaConfig) -> None:
        self._folder = _absolute(folder)
        self._config = config
        self._shapes = expected_shapes(replace(config, tie_word_embeddings=False))
        self._context = ts.Context({"cache_pool": {"total_bytes_limit": _INDEX_CACHE_BYTES}})
        if not isinstance(self._folder, RemotePath):
            for path in (self._folder / _ARRAYS).rglob("*"):
                if not path.is_dir():
                    check_is_file(path)  # TensorStore would wait for the end of a pipe
        self._description = Description.read(self._folder, self._config)
        self._form = self._description.form(self._config)

    def contents(self) -> Contents:
        described, config = self._description, self._config
        return Contents(
            config=replace(config, checkpoint_dtype=described.dtype),
            dtypes=(described.dtype,),
            quantization=self._form,
            activations=described.activations,
            exact_form=self._form,
        )

    def kv_ranges(self) -> np.ndarray | None:
        return self._description.ranges(self._config)

    def shape(self, key: str) -> tuple[int, ...]:
        return self._shapes[key]

    def reader(self, key: str, rows: slice) -> Reader:
        return self._reader(parameter_of(key, self._config.family), self.shape(key))

    def kept_reader(self, name: str, key: str, form: WeightForm) -> Reader:
        return self._reader(_array(key, self._config, name), self.shape(key)[: 2 if name == "kernel" else 1])

    def scales(self, key: str) -> tuple[np.ndarray, int | None] | None:
        path = _array(key, self._config, "").removesuffix(".")
        if self._form is None or not isinstance(form := self._form.at(path), EightBit):
            return None
        return self.kept_reader("scale", key, form)((slice(None),))[:, None], None

    def input_scale(self, key: str) -> np.float32:
        return np.float32(self._reader(f"{module_of(key, self._config.family)}.input_scale", ())(()).item())

    def _reader(self, name: str, begins: tuple[int, ...]) -> Reader:
        """A function that reads parts of a stored array, whose shape begins with `begins`. Chips that share a part get
        one copy of it."""

        @contextmanager
        def in_words() -> Iterator[None]:
            try:
                yield
            except MemoryError:
                raise
            except Exception as error:  # TensorStore raises different Python types for its status codes
                raise ValueError(f"{self._folder}: {name} cannot be read: {_remedy(error)}") from error

        with in_words():
            kvstore = {"driver": "ocdbt", "base": _store(self._folder / _ARRAYS), "path": f"{name}/"}
            spec = {"driver": "zarr", "kvstore": kvstore}
            stored = ts.open(spec, context=self._context, read=True, open=True).result()
            if stored.shape[: len(begins)] != begins:
                raise ValueError(f"its shape is {[*stored.shape]} and should be {[*begins]}")

        @cache
        def read(index: tuple[slice, ...]) -> np.ndarray:
            with in_words():
                part: np.ndarray = stored[index].read().result()
            return part.astype(np.int8) if part.dtype == "int4" else part

        return read


def check_place(folder: Place) -> None:
    """Raises ValueError if no converted weights can be at this place."""
    _store(_absolute(folder))


def _absolute(folder: Place | str) -> Place:
    where = place(folder, "the folder")
    return where if isinstance(where, RemotePath) else where.absolute()


def _store(folder: Place) -> dict[str, str]:
    """TensorStore's specification of the folder. ValueError if it has no driver for the folder's scheme."""
    if not isinstance(folder, RemotePath):
        return {"driver": "file", "path": f"{folder}/"}
    if folder.scheme not in _DRIVERS:
        kinds = " and ".join(f"{scheme}://" for scheme in _DRIVERS)
        raise ValueError(f"{folder}: converted weights are on a disk or on {kinds}, which TensorStore reads")
    bucket, _, path = folder.path.partition("/")
    return {"driver": _DRIVERS[folder.scheme], "bucket": bucket, "path": f"{path}/"}


def _parts(name: str, config: LlamaConfig) -> dict[str, Source | None]:
    """The arrays that are stored for a parameter, each with its tensor of the checkpoint if it is of a fused
    projection."""
    module, _, kind = name.rpartition(".")
    fused = {name for name, tensors in config.family.linears.items() if len(tensors) > 1}
    if kind == "input_scale" or ".".join(module.split(".")[2:4]) not in fused:
        return {name: None}
    parts = sources(f"{module}.kernel", config.family)
    return {_array(part.key, config, kind): part for part in parts}


def _array(key: str, config: LlamaConfig, kind: str) -> str:
    """The name of the stored array with this parameter of the kernel `key`, such as its scales."""
    return parameter_of(key, config.family).removesuffix("kernel") + kind


def _in_chunks(
    tensor: np.ndarray, spec: PartitionSpec, config: LlamaConfig, part: Source | None
) -> tuple[jax.Array, ocp.SaveArgs]:
    """What Orbax saves in chunks along the axis that chips cut. Any number of chips takes whole chunks.

    Orbax cuts an array along the axis over which its devices share it.
    """
    count = 1
    if TENSOR_AXIS in spec:
        # A number of chips over which the model divides is a divisor of this.
        finest = math.gcd(config.num_heads, config.intermediate_size, config.vocab_size)
        is_kv = part is not None and part.is_kv
        count = config.num_kv_heads if is_kv else math.gcd(finest, tensor.shape[spec.index(TENSOR_AXIS)])
    devices = next((number for number in range(2, jax.device_count() + 1) if count % number == 0), 1)
    array = jax.device_put(tensor, NamedSharding(make_mesh(devices), spec))
    return array, ocp.SaveArgs(chunk_byte_size=tensor.nbytes // count if devices > 1 else None)


def _remedy(error: Exception) -> str:
    """What to do about an error of TensorStore, and the error."""
    is_denied = any(code in str(error) for code in ("PERMISSION_DENIED", "UNAUTHENTICATED", "UNAVAILABLE"))
    first, *_ = str(error).splitlines() or [type(error).__name__]
    return f"{'allow this machine to read it' if is_denied else 'convert again'} ({first[:300]})"


def _identity(config: LlamaConfig) -> dict[str, Any]:
    """The fields that identify a model: all except the begin and end ids and the dtype of the checkpoint."""
    return replace(config, checkpoint_dtype=None, bos_token_id=None, eos_token_ids=()).to_hf()
