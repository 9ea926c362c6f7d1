"""Reads `pytorch_model.bin`: tensors that torch.save wrote as a ZIP archive of a pickle and raw buffers.

A pickle can run any code. Here it can only build tensors: every other name in it is refused. The buffers are mapped and
read by slices, as those of safetensors are.
"""

from __future__ import annotations

import pickle
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from model.inputs.words import shown

_MAX_PICKLE_BYTES = 64 << 20
_LOCAL_HEADER_BYTES = 30  # of a ZIP entry, before its name; the last four bytes are the lengths of name and extra field

# torch's storages -> safetensors' names of their types
_TYPES: dict[str, tuple[str, Any]] = {
    "FloatStorage": ("F32", np.float32),
    "HalfStorage": ("F16", np.float16),
    "BFloat16Storage": ("BF16", ml_dtypes.bfloat16),
    "LongStorage": ("I64", np.int64),
    "IntStorage": ("I32", np.int32),
    "BoolStorage": ("BOOL", np.bool_),
}


@dataclass(frozen=True)
class TorchTensor:
    """One mapped tensor, with those methods of safetensors' slices that are used here."""

    values: np.ndarray
    type_name: str

    def get_shape(self) -> list[int]:
        return list(self.values.shape)

    def get_dtype(self) -> str:
        return self.type_name

    def __getitem__(self, index: Any) -> np.ndarray:
        return np.array(self.values[index])


def read_torch_file(path: Path) -> dict[str, TorchTensor]:
    """The tensors of a state dict, by name. Raises ValueError if the file is not one."""
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is not a ZIP archive of torch.save: download it again, or store it as safetensors")
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if len(names) != 1 or archive.getinfo(names[0]).file_size > _MAX_PICKLE_BYTES:
            raise ValueError(f"{path} holds no state dict: {len(names)} pickles in the archive")
        storages = _Storages(path, archive, names[0].removesuffix("data.pkl"))
        with archive.open(names[0]) as file:
            found = _Unpickler(file, path, storages).load_tensors()
    if not isinstance(found, dict) or not all(isinstance(value, TorchTensor) for value in found.values()):
        raise ValueError(f"{path} holds other things than tensors by name")
    return {str(name): value for name, value in found.items()}


class _Storages:
    """The raw buffers of the archive. They are stored, not compressed."""

    def __init__(self, path: Path, archive: zipfile.ZipFile, prefix: str) -> None:
        self._path, self._archive, self._prefix = path, archive, prefix

    def map(self, key: str, dtype: Any, count: int) -> np.ndarray:
        name = f"{self._prefix}data/{key}"
        try:
            entry = self._archive.getinfo(name)
        except KeyError as error:
            raise ValueError(f"{self._path} lacks the buffer {name}: download it again") from error
        size = count * np.dtype(dtype).itemsize
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size < size:
            raise ValueError(f"{self._path}: the buffer {name} has {entry.file_size} bytes and should have {size}")
        with self._path.open("rb") as file:
            file.seek(entry.header_offset + _LOCAL_HEADER_BYTES - 4)
            lengths = file.read(4)
        start = _LOCAL_HEADER_BYTES + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
        if count == 0:
            return np.empty(0, dtype)
        raw = np.memmap(self._path, np.uint8, "r", offset=entry.header_offset + start, shape=(size,))
        return raw.view(dtype)


@dataclass(frozen=True)
class _Storage:
    values: np.ndarray
    type_name: str


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, path: Path, storages: _Storages) -> None:
        super().__init__(file)
        self._path, self._storages = path, storages

    def load_tensors(self) -> Any:
        try:
            return self.load()
        except (pickle.UnpicklingError, EOFError, TypeError, AttributeError, IndexError, KeyError) as error:
            raise ValueError(f"{self._path} holds no state dict: {error}") from error

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _TYPES:
            return name
        allowed = {
            ("collections", "OrderedDict"): OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): _tensor,
            ("torch._utils", "_rebuild_parameter"): _parameter,
        }
        if (module, name) not in allowed:
            raise ValueError(
                f"{self._path} needs {shown(f'{module}.{name}')}, which is not read: store it as safetensors"
            )
        return allowed[module, name]

    def persistent_load(self, pid: Any) -> _Storage:
        kind, type_name, key, _, count = pid
        if kind != "storage" or type_name not in _TYPES:
            raise ValueError(f"{self._path} holds {shown(kind)} of type {shown(type_name)}, which is not read")
        name, dtype = _TYPES[type_name]
        return _Storage(self._storages.map(str(key), dtype, int(count)), name)


def _tensor(storage: _Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any) -> TorchTensor:
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if min((offset, *shape, *strides), default=0) < 0 or (0 not in shape and last >= storage.values.size):
        raise ValueError(f"a tensor of shape {shape} does not fit into its buffer of {storage.values.size} values")
    steps = tuple(stride * storage.values.itemsize for stride in strides)
    values = np.lib.stride_tricks.as_strided(storage.values[offset:], shape, steps, writeable=False)
    return TorchTensor(values, storage.type_name)


def _parameter(data: TorchTensor, *_: Any) -> TorchTensor:
    return data
