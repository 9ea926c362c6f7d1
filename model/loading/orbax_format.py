"""The stored form of a model, in Orbax files: its parameters are already fused and cast.

What is stored does not depend on a number of chips: every array is a stack of parts (`model.loading.parts`), and each
chip reads the parts that it needs. A load skips, for the stored dtype, casting.

Orbax writes the arrays. TensorStore, the library under Orbax, reads ranges of parts. The host compares the checksum of
each part before the part goes to its chip: neither library would notice a changed byte.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from flax import nnx
from jax.sharding import Mesh

from model.config import LlamaConfig
from model.inputs.json_file import check_is_file, read_object
from model.inputs.paths import Place, place, write_whole
from model.inputs.remote import GCS, RemotePath
from model.loading.kv_ranges import save_kv_ranges
from model.loading.parts import Parts
from model.loading.source import CONVERSION_FILE
from model.loading.weights import fill_each
from model.network.llama import Llama
from model.network.sharding import abstract_model, num_shards_of
from model.quantization.forms import Activations, Rounding, form_named, is_form_name

FORMAT = 7
DTYPES = ("bfloat16", "float32")
_ARRAYS = "arrays"
_DRIVERS = {GCS: "gcs", "s3": "s3"}  # of TensorStore, by the schemes of URLs
_INDEX_CACHE_BYTES = 100 << 20  # of TensorStore, for the tables that locate arrays in its files


@dataclass(frozen=True, kw_only=True)
class Description:
    """`stored.json`: the model that was converted, and the checksums of all arrays."""

    dtype: str  # of the parameters that are not quantised
    quantization: str | None  # of the projections and the head, as `forms.form_named` reads it
    activations: str | None  # what a quantised checkpoint said of the inputs of its projections
    config: Mapping[str, Any]  # the fields that identify the model, as in `config.json`
    checksums: Mapping[str, list[int]]  # array -> CRC-32 of each part
    kv_ranges: int | None  # CRC-32 of the file with the ranges of keys and values; None if there is none

    @classmethod
    def read(cls, folder: Place) -> Self:
        """Raises ValueError if the conversion is unfinished, of another format, or damaged."""
        path = folder / CONVERSION_FILE
        if not path.exists():
            raise ValueError(f"{folder} holds no finished conversion ({CONVERSION_FILE} is missing): convert again")
        try:
            raw = read_object(path)
        except ValueError as error:
            raise ValueError(f"{error}: convert again") from error
        if raw.get("format") != FORMAT:
            raise ValueError(f"{path} has format {raw.get('format')}, this version reads {FORMAT}: convert again")
        match raw:
            case {
                "dtype": str(dtype),
                "quantization": form,
                "activations": activations,
                "config": dict(),
                "checksums": dict(checksums),
                "kv_ranges": None | int(),
            } if (
                dtype in DTYPES
                and (form is None or is_form_name(form))
                and activations in (None, *Activations)
                and all(isinstance(listed, list) for listed in checksums.values())
            ):
                return cls(**{name: raw[name] for name in cls.__dataclass_fields__})
        raise ValueError(f"{path} is damaged: convert again")

    def write(self, folder: Place) -> None:
        write_whole(folder / CONVERSION_FILE, (json.dumps({"format": FORMAT} | vars(self), indent=2) + "\n").encode())

    def check(self, folder: Place, config: LlamaConfig) -> None:
        """Raises ValueError if `folder` holds another model."""
        expected = _identity(config)
        differing = [key for key, value in self.config.items() if expected.get(key) != value]
        if differing:
            names = ", ".join(differing)
            raise ValueError(f"{folder} holds another model than the config next to it ({names} differ): convert again")


def save_orbax(
    model: Llama,
    folder: Place | str,
    config: LlamaConfig,
    kv_ranges: np.ndarray | None = None,
    activations: Activations | None = None,
) -> None:
    """Writes the stored form of a model on one chip to `folder`, which must be new or empty. Any number of chips can
    load it.

    Args:
        config: the checkpoint's own.
        kv_ranges: see `kv_ranges.read_kv_ranges`.
        activations: of a checkpoint that was quantised. If they are static, the model has the scales.
    """
    if model.num_shards != 1:
        raise ValueError(f"only a model on one chip can be stored: {model.num_shards=}")
    folder = _absolute(folder)
    _store(folder)
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty")
    folder.mkdir(parents=True, exist_ok=True)
    variables = {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(nnx.state(model))}
    arrays = {}
    for name, variable in variables.items():
        array = np.asarray(variable.get_value())
        arrays[name] = Parts.of(name, variable.get_metadata("axes"), array.shape, config).stacked(array)
    # Weights do not compress; trying costs most of the time of a restore. A part is a chunk: it can be read alone.
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False, use_ocdbt=True)) as checkpointer:
        options = {name: ocp.SaveArgs(shard_axes=(0,)) for name in arrays}
        checkpointer.save(str(folder / _ARRAYS), args=ocp.args.PyTreeSave(arrays, save_args=options))
    description = Description(
        dtype=model.dtype.name,
        quantization=None if model.quantization is None else str(model.quantization),
        activations=activations,
        config=_identity(config),
        # Of the arrays in memory: a byte that changes during the write is found, too.
        checksums={name: [_crc32(part) for part in stack] for name, stack in arrays.items()},
        kv_ranges=None if kv_ranges is None else save_kv_ranges(folder, kv_ranges),
    )
    description.write(folder)  # last: a folder without it is unfinished


def load_orbax(
    folder: Place | str,
    config: LlamaConfig,
    *,
    dtype: Any,
    mesh: Mesh | None = None,
    rounding: Rounding | None = None,
) -> Llama:
    """The model that `save_orbax` wrote. Each part is verified before it goes to its chip. A host reads only what its
    chips hold.

    Parameters that are not quantised are cast to `dtype`; quantised weights stay as they were stored.

    Raises:
        ValueError: the folder is unfinished or damaged, or holds another model or another format; or the model, or
            its groups of 4-bit weights, do not divide over the chips. The message names the damaged array, and the
            part if there are several.
    """
    folder = _absolute(folder)
    if not isinstance(folder, RemotePath):
        for path in (folder / _ARRAYS).rglob("*"):
            if not path.is_dir():
                check_is_file(path)  # TensorStore would wait for the end of a pipe
    description = Description.read(folder)
    description.check(folder, config)
    form = form_named(description.quantization, config.projection_inputs) if description.quantization else None
    kept: dict[str, Any] = {"quantization": form, "rounding": rounding}
    as_stored = nnx.to_flat_state(nnx.state(abstract_model(config, dtype=description.dtype, **kept)))
    likes = {".".join(map(str, path)): variable for path, variable in as_stored}
    model = abstract_model(config, dtype=dtype, mesh=mesh, **kept)
    context = ts.Context({"cache_pool": {"total_bytes_limit": _INDEX_CACHE_BYTES}})

    def restored(name: str, like: jax.ShapeDtypeStruct) -> jax.Array:
        stored, axes = likes[name].get_value(), likes[name].get_metadata("axes")
        parts = Parts.of(name, axes, stored.shape, config)
        checksums = description.checksums.get(name)
        if checksums is None or len(checksums) != parts.count:
            raise ValueError(f"{folder / CONVERSION_FILE} lacks checksums of {name}: convert again")
        array = _StoredArray(folder, name, parts, stored.dtype, checksums, context)
        return array.on_chips(like, num_shards_of(mesh))

    return fill_each(model, restored)


class _StoredArray:
    """One array of a folder.

    Args:
        checksums: of its parts.

    Raises:
        ValueError: it cannot be opened, or has another shape or type.
    """

    def __init__(
        self, folder: Place, name: str, parts: Parts, dtype: Any, checksums: list[int], context: ts.Context
    ) -> None:
        self.folder, self.name, self.parts, self.checksums = folder, name, parts, checksums
        self.stored = _open(folder, name, context)
        shape = (parts.count, *parts.shape)
        if (self.stored.shape, self.stored.dtype.name) != (shape, dtype.name):
            raise ValueError(
                f"{folder}: {name} is {self.stored.dtype.name}{list(self.stored.shape)} and should be "
                f"{dtype.name}{list(shape)}: convert again"
            )

    def on_chips(self, like: jax.ShapeDtypeStruct, chips: int) -> jax.Array:

        def read(index: tuple[slice, ...]) -> np.ndarray:
            chip = 0
            if (axis := self.parts.axis) is not None:
                start, stop, _ = index[axis].indices(like.shape[axis])
                chip = start // (stop - start)
            return self.parts.joined([self.verified(numbers) for numbers in self.parts.of_chip(chip, chips)])

        array = jax.make_array_from_callback(like.shape, like.sharding, read)  # type: ignore[arg-type]  # jax never passes None
        if array.dtype != like.dtype:
            array = _cast(array, dtype=like.dtype)
        # Waiting here limits the parameters in flight to the few that `fill` works on.
        return jax.block_until_ready(array)

    def verified(self, numbers: range) -> np.ndarray:
        try:
            stack = self.stored[numbers.start : numbers.stop].read().result()
        except Exception as error:  # TensorStore raises different Python types for its status codes
            raise ValueError(f"{self.folder}: {self.what(numbers)} cannot be read: {_remedy(error)}") from error
        for number, part in zip(numbers, stack, strict=True):
            if _crc32(part) != self.checksums[number]:
                raise ValueError(
                    f"{self.folder}: {self.what(range(number, number + 1))} is damaged, its checksum is not the one "
                    "stored: convert again"
                )
        return stack

    def what(self, numbers: range) -> str:
        if self.parts.count == 1:
            return self.name
        last = f" to {numbers.stop}" if len(numbers) > 1 else ""
        return f"part {numbers.start + 1}{last} of {self.parts.count} of {self.name}"


def check_place(folder: Place) -> None:
    """Raises ValueError if no converted weights can be at this place."""
    _store(_absolute(folder))


def _absolute(folder: Place | str) -> Place:
    where = place(folder, "the folder")
    return where if isinstance(where, RemotePath) else where.absolute()


def _store(folder: Place) -> dict[str, str]:
    """What TensorStore calls the folder. ValueError if it has no driver for it."""
    if not isinstance(folder, RemotePath):
        return {"driver": "file", "path": f"{folder}/"}
    if folder.scheme not in _DRIVERS:
        kinds = " and ".join(f"{scheme}://" for scheme in _DRIVERS)
        raise ValueError(f"{folder}: converted weights are on a disk or on {kinds}, which TensorStore reads")
    bucket, _, path = folder.path.partition("/")
    return {"driver": _DRIVERS[folder.scheme], "bucket": bucket, "path": f"{path}/"}


def _remedy(error: Exception) -> str:
    """What to do about an error of TensorStore, and the error."""
    is_denied = any(code in str(error) for code in ("PERMISSION_DENIED", "UNAUTHENTICATED", "UNAVAILABLE"))
    first, *_ = str(error).splitlines() or [type(error).__name__]
    return f"{'allow this machine to read it' if is_denied else 'convert again'} ({first[:300]})"


def _open(folder: Place, name: str, context: ts.Context) -> ts.TensorStore:
    base = _store(folder / _ARRAYS)
    spec = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"}}
    try:
        return ts.open(spec, context=context, read=True, open=True).result()
    except Exception as error:  # TensorStore raises different Python types for its status codes
        raise ValueError(f"{folder}: {name} cannot be opened: {_remedy(error)}") from error


@partial(jax.jit, static_argnames="dtype")
def _cast(array: jax.Array, *, dtype: Any) -> jax.Array:
    return array.astype(dtype)


def _crc32(part: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(part).reshape(-1).view(np.uint8))


def _identity(config: LlamaConfig) -> dict[str, Any]:
    """The fields that identify a model: all except the begin and end ids and the dtype of the checkpoint."""
    return replace(config, checkpoint_dtype=None, bos_token_id=None, eos_token_ids=()).to_hf()
