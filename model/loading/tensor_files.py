"""The safetensors files of one checkpoint folder: found, opened together, checked against the model, read by slices."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import PurePath

import numpy as np

from model.config import LlamaConfig
from model.inputs.json_file import read_object
from model.inputs.paths import Place
from model.inputs.words import shown
from model.loading.hf_format import (
    EMBEDDING,
    HEAD,
    IGNORED,
    INDEX_FILE,
    SINGLE_FILE,
    adapter_fault,
    by_path,
    expected_kernels,
    expected_shapes,
    is_adapter,
)
from model.loading.kv_ranges import read_kv_ranges
from model.loading.remote_tensors import RemoteSlice, RemoteTensors
from model.loading.tensors import Checkpoint, Contents, Reader
from model.quantization.checkpoint_form import CheckpointForm
from model.quantization.forms import Activations, MixedForms, Plain, WeightForm
from model.quantization.packed_form import PackedKernel
from model.quantization.stored_form import Part

DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}  # those that can be read
_PLAIN = re.compile(r"[\w.-]{1,200}")  # the names of tensors that errors repeat as they are
_ROWS_COMPARED = 4096  # of the head and the embedding at once; bounds the host's memory
_FILES_AT_ONCE = 16  # whose heads are read


class TensorFiles(Checkpoint):
    """The tensors of a folder by name. Slices are read from the disk or the bucket when asked for.

    As in the reference implementation, a `model.safetensors` is the whole checkpoint, even with an index next to it.
    Otherwise the index lists the files; without an index, all `*.safetensors` are read.

    Raises:
        ValueError: there are no files, the index is invalid, a file is incomplete, or the tensors are not those of
            `config`: each one that is missing, repeated, unexpected, mis-shaped or of an unreadable type is named.
    """

    def __init__(self, folder: Place, config: LlamaConfig):
        self._folder = folder
        self._config = config
        self._form = config.quantized
        self._slices: dict[str, RemoteSlice] = {}
        self._kernels: dict[str, PackedKernel] = {}  # those that are unpacked when they are read
        self._lacking: dict[str, set[str]] = {}  # file name -> tensors that the index lists in it and that it lacks
        self._repeated: set[str] = set()
        files = files_in(folder)
        with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
            opened = list(pool.map(RemoteTensors, (folder / name for name in files)))
        self.versions = {file.file: file.version for file in opened}
        for (name, promised), file in zip(files.items(), opened, strict=True):
            slices = file.slices()
            if absent := set(promised or ()) - slices.keys():
                self._lacking[name] = absent
            self._repeated |= self._slices.keys() & slices.keys()
            self._slices |= slices
        self._check()
        for key, shape in self._quantized().items():
            module = key.removesuffix("weight")
            named = ((name, self._slices.get(module + name)) for name in self._form_parts(shape))
            parts = {name: found for name, found in named if found is not None}
            if self._form is not None and (kernel := self._form.kernel(module.removesuffix("."), parts, shape)):
                self._kernels[key] = kernel

    def contents(self) -> Contents:
        """Reads the slices' types and names. A head that differs from the embedding is used even if the config ties
        both, as in transformers."""
        config, form, plain = self._config, self._form, self._plain()
        dtypes = {DTYPES[self._slices[key].get_dtype()] for key in plain.keys() & self._slices.keys()}
        has_both = config.tie_word_embeddings and self._slices.keys() >= {HEAD.key, EMBEDDING.key}
        if has_both and not self._are_equal(HEAD.key, EMBEDDING.key):
            config = replace(config, tie_word_embeddings=False)
        found = Contents(config=config, dtypes=tuple(sorted(dtypes)))
        if form is None:
            return found
        quantized = self._quantized()
        modules = [key.removesuffix("weight") for key in quantized if key != HEAD.key]
        left = sorted(path for path, is_quantized in by_path(quantized.__contains__, config) if not is_quantized)

        def with_plain[F: WeightForm](form: F | None) -> F | MixedForms | None:
            return form and MixedForms(most=form, others=tuple((path, Plain()) for path in left)) if left else form

        types: dict[str, set[str]] = defaultdict(set)
        for module, part in product(modules, self._form_parts((1, 1))):
            if module + part in self._slices:
                types[part].add(self._slices[module + part].get_dtype())
        has_scales = all(f"{module}input_scale" in self._slices for module in modules)
        # Without stored scales of the inputs, each token has a scale of its own.
        is_static = form.activations is Activations.STATIC and not has_scales
        four_bit, fault = form.in_four_bits(config.projection_inputs)
        return replace(
            found,
            quantization=with_plain(form.form),
            activations=Activations.DYNAMIC if is_static else form.activations,
            packing=form.name,
            four_bit=with_plain(four_bit),
            exact_form=with_plain(form.in_exact_form(config.projection_inputs, types)),
            four_bit_fault=fault,
        )

    def kv_ranges(self) -> np.ndarray | None:
        return read_kv_ranges(lambda key: self._values(key) if key in self._slices else None, self._config)

    def _values(self, key: str) -> np.ndarray:
        """The whole tensor, in float32 and flat."""
        return self._slices[key][...].astype(np.float32).reshape(-1)

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._slice(key).get_shape())

    def reader(self, key: str, rows: slice) -> Reader:
        """Reads parts of these rows; a packed kernel is unpacked to float32. They are read here, once for all parts."""
        stored = self._slice(key)
        if isinstance(stored, PackedKernel):
            return stored.read_once().__getitem__
        return stored.reader(rows)

    def kept_reader(self, name: str, key: str, form: WeightForm) -> Reader:
        kernel = self._kernels[key].read_once()
        return lambda index: kernel.part(name, index, form)

    def _slice(self, key: str) -> RemoteSlice | PackedKernel:
        """The stored tensor. If the head is tied to the embedding, either may be stored alone: see `_plain`."""
        if key in self._kernels:
            return self._kernels[key]
        other = {EMBEDDING.key: HEAD.key, HEAD.key: EMBEDDING.key}
        return self._slices[key if key in self._slices else other[key]]

    def scales(self, key: str) -> tuple[np.ndarray, int | None] | None:
        form, module = self._form, key.removesuffix("weight")
        if not isinstance(form, CheckpointForm) or module + form.scale not in self._slices:
            return None
        scales = form.row_scales(self._slices[module + form.scale][...], self.shape(key)[0])
        return scales, None if form.block is None else form.block[1]

    def input_scale(self, key: str) -> np.float32:
        name = key.removesuffix("weight") + "input_scale"
        scale = self._values(name).max()
        if not 0 < scale < np.inf:
            raise ValueError(f"{name} must be a positive number: {scale}")
        return np.float32(scale)

    def _check(self) -> None:
        tensors = {key: Part((shape,), tuple(DTYPES)) for key, shape in self._plain().items()}
        for key, shape in self._quantized().items():
            module = key.removesuffix("weight")
            tensors |= {module + name: part for name, part in self._form_parts(shape).items()}
        problems = [
            f"{name} lacks tensors that the index promises: {grouped(keys)}" for name, keys in self._lacking.items()
        ]
        absent = set().union(*self._lacking.values())
        missing, others = faults_of(self._slices, tensors, absent=absent)
        problems += missing
        problems += [f"in more than one file: {grouped(self._repeated)}"] if self._repeated else []
        problems += others
        if problems:
            raise ValueError(f"{self._folder} does not hold this model's weights: " + "; ".join(problems))

    def _plain(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors that must be there, quantised kernels excluded. If the config ties the head to the
        embedding, the files may hold either of them or both, as in the reference implementation."""
        expected, quantized = expected_shapes(self._config), self._quantized()
        if HEAD.key in self._slices:
            expected[HEAD.key] = expected[EMBEDDING.key]
            if self._config.tie_word_embeddings and EMBEDDING.key not in self._slices:
                del expected[EMBEDDING.key]
        return {key: shape for key, shape in expected.items() if key not in quantized}

    def _quantized(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the quantised kernels: the head if it has the form's mark, and the projections without those
        that are stored in a float type. If all are, the quantised ones are missing."""
        if self._form is None:
            return {}
        mark, kernels = HEAD.key.removesuffix("weight") + self._form.mark, expected_kernels(self._config)
        kernels = {key: shape for key, shape in kernels.items() if key != HEAD.key or mark in self._slices}
        plain = {key for key in kernels.keys() & self._slices.keys() if self._slices[key].get_dtype() in DTYPES}
        return {key: shape for key, shape in kernels.items() if key not in plain or plain >= kernels.keys()}

    def _form_parts(self, shape: tuple[int, ...]) -> dict[str, Part]:
        rows, columns = shape
        return {} if self._form is None else self._form.parts(rows, columns)

    def _are_equal(self, first: str, second: str) -> bool:
        """Whether two tensors of one shape hold the same values. Their dtypes may differ."""
        num_rows = self.shape(first)[0]
        for start in range(0, num_rows, _ROWS_COMPARED):
            rows = (slice(start, min(start + _ROWS_COMPARED, num_rows)),)
            one, other = (self._slice(key)[rows] for key in (first, second))
            if not np.array_equal(one.astype(np.float32), other.astype(np.float32)):
                return False
        return True


def faults_of(
    found: Mapping[str, RemoteSlice], expected: Mapping[str, Part], *, absent: Set[str] = frozenset()
) -> tuple[list[str], list[str]]:
    """What is missing among the tensors, and what else is wrong with them. `absent` are not named again."""
    required = {key for key, part in expected.items() if part.is_required}
    missing = required - found.keys() - absent
    extra = {key for key in found.keys() - expected.keys() if not IGNORED.fullmatch(key)}
    present = {key: (found[key], part) for key, part in expected.items() if key in found}
    problems = [f"unexpected: {grouped(extra)}"] if extra else []
    problems += by_message(
        (f"has shape {tuple(one.get_shape())}, not {_one_of(part.shapes)}", key)
        for key, (one, part) in present.items()
        if tuple(one.get_shape()) not in part.shapes
    )
    problems += by_message(
        (f"has type {one.get_dtype()}, not one of {', '.join(part.types)}", key)
        for key, (one, part) in present.items()
        if one.get_dtype() not in part.types
    )
    return [f"missing: {grouped(missing)}"] if missing else [], problems


def _one_of(shapes: Sequence[tuple[int, ...]]) -> str:
    return str(shapes[0]) if len(shapes) == 1 else f"one of {', '.join(map(str, shapes))}"


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
        key = key if _PLAIN.fullmatch(key) else shown(key)
        match = re.fullmatch(r"((?:.+\.)?layers[._])(\d+)\.(.+)", key)
        if match:
            layers[match[3], match[1]].append(int(match[2]))
        else:
            layers[key, ""] = []
    return ", ".join(
        f"{before}{{{','.join(map(str, sorted(numbers)))}}}.{name}" if numbers else name
        for (name, before), numbers in sorted(layers.items())
    )
