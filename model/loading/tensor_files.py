"""The safetensors files of one checkpoint folder: found, opened together, checked against the model, read by slices."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import PurePath
from typing import Self

import numpy as np

from model.config import LlamaConfig
from model.inputs.json_file import read_object
from model.inputs.paths import Place
from model.loading.hf_format import (
    EMBEDDING,
    HEAD,
    IGNORED,
    INDEX_FILE,
    SINGLE_FILE,
    adapter_fault,
    expected_kernels,
    expected_shapes,
    input_scale_key,
    is_adapter,
    part_keys,
    scale_key,
)
from model.loading.packed_kernel import PackedKernel
from model.loading.remote_tensors import RemoteSlice, RemoteTensors
from model.loading.tensors import Checkpoint, Reader
from model.quantization.checkpoint_form import CheckpointForm
from model.quantization.forms import Activations, EightBit, FourBit, SixBit
from model.quantization.packed_form import NAMES, PackedForm, Part

DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}  # those that can be read
_ROWS_COMPARED = 4096  # of the head and the embedding at once; bounds the host's memory
_FILES_AT_ONCE = 16  # whose heads are read
_FLOAT8 = "F8_E4M3"


class TensorFiles(Checkpoint):
    """The tensors of a folder by name. Slices are read from the disk or the bucket when asked for.

    As in the reference implementation, a `model.safetensors` is the whole checkpoint, even with an index next to it.
    Otherwise the index lists the files; without an index, all `*.safetensors` are read.

    Raises:
        ValueError, on entering: there are no files, the index is invalid, a file is incomplete, or the tensors are not
        those of `config`: each one that is missing, repeated, unexpected, mis-shaped or of an unreadable type is named.
    """

    def __init__(self, folder: Place, config: LlamaConfig):
        self._folder = folder
        self._files: list[RemoteTensors] = []
        self._config = config
        form = config.quantized
        self._form = form if isinstance(form, CheckpointForm) else None
        self._packed_form = form if isinstance(form, PackedForm) else None
        self._slices: dict[str, RemoteSlice] = {}
        self._kernels: dict[str, PackedKernel] = {}
        self._lacking: dict[str, set[str]] = {}  # file name -> tensors that the index lists in it and that it lacks
        self._repeated: set[str] = set()

    def __enter__(self) -> Self:
        files = files_in(self._folder)
        with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
            self._files = list(pool.map(RemoteTensors, (self._folder / name for name in files)))
        for (name, promised), file in zip(files.items(), self._files, strict=True):
            slices = file.slices()
            if absent := set(promised or ()) - slices.keys():
                self._lacking[name] = absent
            self._repeated |= self._slices.keys() & slices.keys()
            self._slices |= slices
        self._check()
        self._kernels = dict(self._packed_kernels())
        return self

    def check_unchanged(self) -> None:
        for file in self._files:
            file.check_unchanged()

    @property
    def form(self) -> EightBit | None:
        return None if self._config.quantized is None else self._config.quantized.form

    def in_four_bits(self) -> tuple[FourBit | None, str | None]:
        form = self._packed_form
        return (None, None) if form is None else form.in_four_bits(self._config.projection_inputs)

    def in_exact_form(self) -> FourBit | None:
        if (form := self._packed_form) is None:
            return None
        modules = [key.removesuffix("weight") for key in expected_kernels(self._config) if key != HEAD.key]
        scales = {self._slices[module + NAMES[form.layout].scales].get_dtype() for module in modules}
        return form.in_exact_four_bits(self._config.projection_inputs, scales)

    @property
    def activations(self) -> Activations | None:
        """What the config says of the inputs of the projections; None: nothing is quantised. Without stored scales of
        the inputs, each token has a scale of its own."""
        stated = None if self._config.quantized is None else self._config.quantized.activations
        kernels = expected_kernels(self._config).keys() - {HEAD.key}
        has_scales = all(input_scale_key(key) in self._slices for key in kernels)
        return Activations.DYNAMIC if stated is Activations.STATIC and not has_scales else stated

    @property
    def packing(self) -> str | None:
        return None if self._packed_form is None else self._packed_form.name

    def __contains__(self, key: str) -> bool:
        return key in self._slices

    def values(self, key: str) -> np.ndarray:
        """The whole tensor, in float32 and flat."""
        return self._slices[key][...].astype(np.float32).reshape(-1)

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._slice(key).get_shape())

    def reader(self, key: str, rows: slice) -> Reader:
        """Reads parts of these rows; a packed kernel is unpacked to float32. They are read here, once for all parts."""
        stored = self._slice(key)
        if isinstance(stored, PackedKernel):
            return stored.read_once().__getitem__
        start, stop, _ = rows.indices(self.shape(key)[0])
        return stored.rows(start, stop).__getitem__

    def kept_reader(self, name: str, key: str, form: FourBit | SixBit) -> Reader:
        kernel = self._kernels[key].read_once()
        assert isinstance(form, FourBit), "only a GGUF file has kernels in 6 bits"
        return lambda index: kernel.part(name, index, form)

    def _slice(self, key: str) -> RemoteSlice | PackedKernel:
        """The stored tensor. If the head is tied to the embedding, either may be stored alone: see `_expected`."""
        if key in self._kernels:
            return self._kernels[key]
        other = {EMBEDDING.key: HEAD.key, HEAD.key: EMBEDDING.key}
        return self._slices[key if key in self._slices else other[key]]

    @property
    def dtypes(self) -> tuple[str, ...]:
        used = self._expected().keys() & self._slices.keys()
        kernels = {key for key in used if self.has_scale(key)}
        return tuple(sorted({DTYPES[self._slices[key].get_dtype()] for key in used - kernels}))

    def has_scale(self, key: str) -> bool:
        return self._form is not None and scale_key(key, self._form) in self._slices

    @property
    def columns_of_a_scale(self) -> int | None:
        return None if self._form is None or self._form.block is None else self._form.block[1]

    def row_scales(self, key: str) -> np.ndarray:
        assert self._form is not None
        values = self._slices[scale_key(key, self._form)][...].astype(np.float32)
        num_rows = self.shape(key)[0]
        if self._form.block is None:
            return np.broadcast_to(values.reshape(-1, 1), (num_rows, 1))
        return values[np.arange(num_rows) // self._form.block[0]]

    def input_scale(self, key: str) -> np.float32:
        scale = self.values(input_scale_key(key)).max()
        if not 0 < scale < np.inf:
            raise ValueError(f"{input_scale_key(key)} must be a positive number: {scale}")
        return np.float32(scale)

    def _check(self) -> None:
        expected, parts, scales = self._expected(), self._parts(), self._scale_shapes()
        known = expected.keys() | parts.keys() | scales.keys()
        required = expected.keys() | scales.keys() | {key for key, part in parts.items() if part.is_required}
        missing = required - self._slices.keys() - set().union(*self._lacking.values())
        extra = {key for key in self._slices.keys() - known if not IGNORED.fullmatch(key)}
        problems = [
            f"{name} lacks tensors that the index promises: {grouped(keys)}" for name, keys in self._lacking.items()
        ]
        problems += [f"missing: {grouped(missing)}"] if missing else []
        problems += [f"in more than one file: {grouped(self._repeated)}"] if self._repeated else []
        problems += [f"unexpected: {grouped(extra)}"] if extra else []
        tensors = {key: Part(shape, self._types_of(key)) for key, shape in expected.items()} | parts
        present = {key: tensors[key] for key in tensors.keys() & self._slices.keys()}
        problems += by_message(
            (f"has shape {self.shape(key)}, not {part.shape}", key)
            for key, part in present.items()
            if self.shape(key) != part.shape
        )
        problems += by_message(
            (f"has type {self._slices[key].get_dtype()}, not one of {', '.join(part.types)}", key)
            for key, part in present.items()
            if self._slices[key].get_dtype() not in part.types
        )
        problems += by_message(
            (f"has shape {self.shape(key)}, not one of {', '.join(map(str, allowed))}", key)
            for key, allowed in scales.items()
            if key in self._slices and self.shape(key) not in allowed
        )
        if problems:
            raise ValueError(f"{self._folder} does not hold this model's weights: " + "; ".join(problems))

    def _expected(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors that must be there, packed kernels excluded. If the config ties the head to the
        embedding, the files may hold either of them or both (`with_own_head` compares them), as in the reference
        implementation."""
        expected = expected_shapes(self._config)
        if HEAD.key in self._slices:
            expected[HEAD.key] = expected[EMBEDDING.key]
            if self._config.tie_word_embeddings and EMBEDDING.key not in self._slices:
                del expected[EMBEDDING.key]
        packed = self._packed()
        return {key: shape for key, shape in expected.items() if key not in packed}

    def _packed(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the packed kernels: all projections, and the head if it is packed."""
        if self._packed_form is None:
            return {}
        values = HEAD.key.removesuffix("weight") + NAMES[self._packed_form.layout].values
        kernels = expected_kernels(self._config)
        return {key: shape for key, shape in kernels.items() if key != HEAD.key or values in self._slices}

    def _parts(self) -> dict[str, Part]:
        """The tensors that hold the packed kernels."""
        if (form := self._packed_form) is None:
            return {}
        by_kernel = [part_keys(key, form, shape) for key, shape in self._packed().items()]
        return {name: part for parts in by_kernel for name, part in parts.items()}

    def _packed_kernels(self) -> Iterator[tuple[str, PackedKernel]]:
        if (form := self._packed_form) is None:
            return
        for key, shape in self._packed().items():
            module = key.removesuffix("weight")
            present = [name for name in part_keys(key, form, shape) if name in self._slices]
            parts = {name.removeprefix(module): self._slices[name] for name in present}
            yield key, PackedKernel(module.removesuffix("."), form, parts, shape)

    def _scale_shapes(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """The allowed shapes of each scale; the head's scale only if it is stored. Empty without 8-bit kernels."""
        if (form := self._form) is None:
            return {}
        shapes: dict[str, tuple[tuple[int, ...], ...]] = {}
        for key, (rows, columns) in expected_kernels(self._config).items():
            name = scale_key(key, form)
            if key == HEAD.key and name not in self._slices:
                continue
            if form.block is not None:
                shapes[name] = ((-(-rows // form.block[0]), -(-columns // form.block[1])),)
            else:
                shapes[name] = ((), (1,), (rows,), (rows, 1))
        return shapes

    def _types_of(self, key: str) -> tuple[str, ...]:
        if self._form is None or not self.has_scale(key):
            return tuple(DTYPES)
        return ("I8",) if self._form.form is EightBit.INT8 else (_FLOAT8,)

    def with_own_head(self) -> LlamaConfig:
        """The config, but untied if it ties the head to the embedding and the files hold a head with other values.

        The reference implementation does the same.
        """
        config = self._config
        if not config.tie_word_embeddings or not self._slices.keys() >= {HEAD.key, EMBEDDING.key}:
            return config
        return config if self._are_equal(HEAD.key, EMBEDDING.key) else replace(config, tie_word_embeddings=False)

    def _are_equal(self, first: str, second: str) -> bool:
        """Whether two tensors of one shape hold the same values. Their dtypes may differ."""
        num_rows = self.shape(first)[0]
        for start in range(0, num_rows, _ROWS_COMPARED):
            rows = (slice(start, min(start + _ROWS_COMPARED, num_rows)),)
            one, other = (self._slice(key)[rows] for key in (first, second))
            if not np.array_equal(one.astype(np.float32), other.astype(np.float32)):
                return False
        return True


def files_in(folder: Place) -> dict[str, list[str] | None]:
    """File name -> the keys that the index lists in it. None: no index is used, and all keys are read."""
    index = folder / INDEX_FILE
    if (folder / SINGLE_FILE).exists():
        return {SINGLE_FILE: None}
    if index.exists():
        return dict(_promises(index))
    if is_adapter(folder):
        raise ValueError(f"{folder} {adapter_fault(folder)}")
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        raise ValueError(f"no safetensors files in {folder} (other weight formats are not read)")
    return dict.fromkeys(names)


def _promises(index: Place) -> dict[str, list[str]]:
    """File name -> keys, from the index. Raises ValueError if it names a file that is not next to it."""
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has no weight_map")
    promised: dict[str, list[str]] = defaultdict(list)
    for key, name in weight_map.items():
        if not isinstance(name, str) or not _is_plain(name):
            raise ValueError(f"{index} must name files next to it, and for {key!r} it has {name!r}")
        promised[name].append(key)
    there = {path.name for path in index.parent.iterdir()}
    if absent := promised.keys() - there:
        raise ValueError(f"{index} names files that are not there: {', '.join(sorted(absent))}")
    return promised


def _is_plain(name: str) -> bool:
    """Whether `name` is a plain file name and not a path: no file outside the folder is opened."""
    return name not in ("", ".", "..") and PurePath(name).name == name


def by_message(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Problems of tensors in words, from pairs of a problem and a name."""
    keys_of = defaultdict(list)
    for message, key in pairs:
        keys_of[message].append(key)
    return [f"{grouped(keys)} {message}" for message, keys in sorted(keys_of.items())]


def grouped(keys: Iterable[str]) -> str:
    """Names all keys; layers that lack the same tensor share one name: model.layers.{0,1,2}.mlp.up_proj.weight."""
    layers: dict[tuple[str, str], list[int]] = defaultdict(list)  # (name, what is before the layer's number)
    for key in keys:
        match = re.fullmatch(r"((?:.+\.)?layers[._])(\d+)\.(.+)", key)
        if match:
            layers[match[3], match[1]].append(int(match[2]))
        else:
            layers[key, ""] = []
    return ", ".join(
        f"{before}{{{','.join(map(str, sorted(numbers)))}}}.{name}" if numbers else name
        for (name, before), numbers in sorted(layers.items())
    )
