"""The stored form of a model, in Orbax files: its parameters are already fused, cast and cut for a number of chips.

A load skips joining and, for the stored dtype, casting; every chip reads its own part. A number of chips that divides
the stored one may load it, too: each chip then takes the parts of several (`model.loading.regroup`).

Orbax writes the arrays. TensorStore, the library under Orbax, reads them shard by shard. The host compares each shard's
checksum before the shard goes to its chip: neither library would notice a changed byte.
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
from jax.sharding import Mesh, Sharding

from model.config import LlamaConfig, read_object
from model.inputs.paths import Place, place, write_whole
from model.inputs.remote import GCS, RemotePath
from model.loading.kv_ranges import save_kv_ranges
from model.loading.regroup import Pieces
from model.loading.weights import fill_each
from model.network.llama import Llama
from model.network.sharding import abstract_model, num_shards_of
from model.quantization.forms import Activations, Rounding, form_named, is_form_name

FORMAT = 6
DTYPES = ("bfloat16", "float32")
DESCRIPTION_FILE = "stored.json"
_ARRAYS = "arrays"
_DRIVERS = {GCS: "gcs", "s3": "s3"}  # of TensorStore, by the schemes of URLs
_INDEX_CACHE_BYTES = 100 << 20  # of TensorStore, for the tables that locate arrays in its files

Index = tuple[slice, ...]


@dataclass(frozen=True, kw_only=True)
class Description:
    """`stored.json`: the model that was converted, the number of chips, and the checksums of all arrays."""

    num_shards: int
    dtype: str  # of the parameters that are not quantised
    quantization: str | None  # of the projections and the head, as `forms.form_named` reads it
    activations: str | None  # what a quantised checkpoint said of the inputs of its projections
    config: Mapping[str, Any]  # the fields that identify the model, as in `config.json`
    checksums: Mapping[str, list[int]]  # array -> CRC-32 of each shard, in the order of the chips
    kv_ranges: int | None  # CRC-32 of the file with the ranges of keys and values; None if there is none

    @classmethod
    def read(cls, folder: Place) -> Self:
        """Raises ValueError if the conversion is unfinished, of another format, or damaged."""
        path = folder / DESCRIPTION_FILE
        if not path.exists():
            raise ValueError(f"{folder} holds no finished conversion ({DESCRIPTION_FILE} is missing): convert again")
        try:
            raw = read_object(path)
        except ValueError as error:
            raise ValueError(f"{error}: convert again") from error
        if raw.get("format") != FORMAT:
            raise ValueError(f"{path} has format {raw.get('format')}, this version reads {FORMAT}: convert again")
        match raw:
            case {
                "num_shards": int(),
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
        """Writes the file whole or not at all."""
        write_whole(folder / DESCRIPTION_FILE, (json.dumps({"format": FORMAT} | vars(self), indent=2) + "\n").encode())

    def check(self, folder: Place, config: LlamaConfig, num_shards: int) -> None:
        """Raises ValueError if `folder` holds another model, or was converted for a number of chips that so many
        cannot share."""
        if self.num_shards % num_shards:
            raise ValueError(
                f"{folder} was converted for {self.num_shards} chip(s), and {num_shards} are asked for: it can be "
                f"loaded on numbers that divide {self.num_shards}; convert again, or load the safetensors"
            )
        expected = _identity(config)
        differing = [key for key, value in self.config.items() if expected.get(key) != value]
        if differing:
            raise ValueError(f"{folder} holds another model than the config next to it: {', '.join(differing)} differ")


def save_orbax(
    model: Llama,
    folder: Place | str,
    config: LlamaConfig,
    kv_ranges: np.ndarray | None = None,
    activations: Activations | None = None,
) -> None:
    """Writes the stored form to `folder`, which must be new or empty.

    Args:
        config: the checkpoint's own, before KV heads were repeated.
        kv_ranges: see `kv_ranges.read_kv_ranges`.
        activations: of a checkpoint that was quantised. If they are static, the model has the scales.
    """
    folder = _absolute(folder)
    _store(folder)
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty")
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {".".join(map(str, path)): variable.get_value() for path, variable in nnx.to_flat_state(nnx.state(model))}
    # Weights do not compress; trying costs most of the time of a restore.
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False, use_ocdbt=True)) as checkpointer:
        checkpointer.save(str(folder / _ARRAYS), arrays)
    description = Description(
        num_shards=model.num_shards,
        dtype=model.dtype.name,
        quantization=None if model.quantization is None else str(model.quantization),
        activations=activations,
        config=_identity(config),
        # Of the arrays in memory: a byte that changes during the write is found, too.
        checksums={name: _checksums(array) for name, array in arrays.items()},
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
    for_cpu: bool = False,
) -> Llama:
    """The model that `save_orbax` wrote. Each shard is read and verified before it goes to its chip.

    Parameters that are not quantised are cast to `dtype`; quantised weights stay as they were stored.

    Raises:
        ValueError: the folder is unfinished or damaged, or holds another model, another format, or the form for
            a number of chips that so many cannot share. The message names the damaged array, and the shard if there
            are several.
    """
    folder = _absolute(folder)
    description = Description.read(folder)
    description.check(folder, config, num_shards_of(mesh))
    form = form_named(description.quantization, config.projection_inputs) if description.quantization else None
    kept: dict[str, Any] = {"mesh": mesh, "quantization": form, "rounding": rounding}
    as_stored = abstract_model(config, dtype=description.dtype, **kept)
    stored_dtypes = [variable.get_value().dtype for _, variable in nnx.to_flat_state(nnx.state(as_stored))]
    model = abstract_model(config, dtype=dtype, for_cpu=for_cpu, **kept)
    parameters = {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(nnx.state(model))}
    pieces = {
        name: Pieces.of(name, variable.get_metadata("axes"), config, description.num_shards, num_shards_of(mesh))
        for name, variable in parameters.items()
    }
    context = ts.Context({"cache_pool": {"total_bytes_limit": _INDEX_CACHE_BYTES}})
    dtypes = dict(zip(parameters, stored_dtypes, strict=True))
    restore = partial(_restore, folder=folder, description=description, dtypes=dtypes, pieces=pieces, context=context)
    return fill_each(model, restore)


def _restore(
    name: str,
    like: jax.ShapeDtypeStruct,
    *,
    folder: Place,
    description: Description,
    dtypes: Mapping[str, Any],
    pieces: Mapping[str, Pieces],
    context: ts.Context,
) -> jax.Array:
    expected, cut = description.checksums.get(name), pieces[name]
    if expected is None or len(expected) != cut.stored:
        raise ValueError(f"{folder / DESCRIPTION_FILE} lacks checksums of {name}: convert again")
    stored = _open(folder, name, context)
    shape = cut.stored_shape(like.shape)
    if (stored.shape, stored.dtype.name) != (shape, dtypes[name].name):
        raise ValueError(
            f"{folder}: {name} is {stored.dtype.name}{list(stored.shape)} and should be "
            f"{dtypes[name].name}{list(shape)}: convert again"
        )

    def read(index: Index) -> np.ndarray:
        """The part of a chip."""
        return cut.joined([verified(number) for number in cut.numbers(index, like.shape)])

    def verified(number: int) -> np.ndarray:
        index = cut.index(number, shape)
        what = name if cut.stored == 1 else f"shard {number + 1} of {cut.stored} of {name}"
        try:
            shard = stored[index].read().result()
        except Exception as error:  # TensorStore raises different Python types for its status codes
            raise ValueError(f"{folder}: {what} cannot be read: {_remedy(error)}") from error
        if _crc32(shard) != expected[number]:
            raise ValueError(f"{folder}: {what} is damaged, its checksum is not the one stored: convert again")
        return shard

    array = jax.make_array_from_callback(like.shape, like.sharding, read)  # type: ignore[arg-type]  # jax never passes None
    if array.dtype != like.dtype:
        array = _cast(array, dtype=like.dtype)
    # Waiting here limits the parameters in flight to the few that `fill` works on.
    return jax.block_until_ready(array)


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
    return f"{'allow this machine to read it' if is_denied else 'convert again'} ({_first_line(error)})"


def _open(folder: Place, name: str, context: ts.Context) -> ts.TensorStore:
    base = _store(folder / _ARRAYS)
    spec = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"}}
    try:
        return ts.open(spec, context=context, read=True, open=True).result()
    except Exception as error:  # as in `_restore`
        raise ValueError(f"{folder}: {name} cannot be opened: {_remedy(error)}") from error


@partial(jax.jit, static_argnames="dtype")
def _cast(array: jax.Array, *, dtype: Any) -> jax.Array:
    return array.astype(dtype)


def _checksums(array: jax.Array) -> list[int]:
    """The checksum of each shard, in the order of the chips. A shard on several chips appears once."""
    held = {_bounds(shard.index, array.shape): shard.data for shard in array.addressable_shards}
    return [_crc32(np.asarray(held[bounds])) for bounds in _shards(array.shape, array.sharding)]


def _shards(shape: tuple[int, ...], sharding: Sharding) -> list[tuple[tuple[int, int], ...]]:
    """Which rows and columns each chip holds, in the order of the chips, without repetitions."""
    indices = sharding.devices_indices_map(shape).values()
    return list(dict.fromkeys(_bounds(index, shape) for index in indices))


def _bounds(index: Index, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _crc32(shard: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(shard).view(np.uint8))


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:300] if str(error) else type(error).__name__


def _identity(config: LlamaConfig) -> dict[str, Any]:
    """The fields that identify a model: all except the begin and end ids and the dtype of the checkpoint."""
    return replace(config, checkpoint_dtype=None, bos_token_id=None, eos_token_ids=()).to_hf()
