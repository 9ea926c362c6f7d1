"""Reads `pytorch_model.bin`: tensors that torch.save wrote as a ZIP archive of a pickle and raw buffers.

A pickle can run any code. Here it can only build tensors: every other name in it is refused. The buffers are read by
rows, as those of safetensors are. As with safetensors, no checksum of them is compared.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Never

import numpy as np

from model.inputs.json_file import check_is_file
from model.inputs.words import shown
from model.loading.remote_tensors import DTYPES, LocalFile, RemoteSlice

_MAX_PICKLE_BYTES = 1 << 20  # of 10,000 tensors
_LOCAL_HEADER_BYTES = 30  # of a ZIP entry, before its name; the last four bytes are the lengths of name and extra field
_MEMO_WRITES = ("PUT", "BINPUT", "LONG_BINPUT")

# torch's storages -> safetensors' names of their types
_TYPES = {
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "BoolStorage": "BOOL",
}


class _Built:
    """An object that a pickle builds with the functions of this module only, and cannot change afterwards."""

    def __setstate__(self, state: object) -> Never:
        raise pickle.UnpicklingError("it changes a tensor that it has built")


@dataclass(frozen=True)
class TorchTensor(_Built, RemoteSlice):
    """One tensor, which need not be contiguous in the file."""

    strides: tuple[int, ...]  # in values

    def _rows(self, start: int, stop: int) -> np.ndarray:
        dtype = np.dtype(DTYPES[self.dtype])
        shape = (max(0, stop - start), *self.shape[1:]) if self.shape else ()
        if 0 in shape:
            return np.empty(shape, dtype)
        begin = self.start + (start * self.strides[0] * dtype.itemsize if self.shape else 0)
        content = self.file.read_range(begin, begin + _extent(shape, self.strides) * dtype.itemsize)
        steps = tuple(stride * dtype.itemsize for stride in self.strides)
        return np.array(np.lib.stride_tricks.as_strided(np.frombuffer(content, dtype), shape, steps))


def read_torch_file(path: Path) -> dict[str, TorchTensor]:
    """The tensors of a state dict, by name. ValueError if the file is not one, OSError if it cannot be opened."""
    check_is_file(path)
    with path.open("rb") as file:
        try:
            if zipfile.is_zipfile(file):
                return _read(path, file)
        except Exception as error:  # of any type: a damaged archive or pickle runs into many
            raise ValueError(f"{path} holds no state dict: {str(error) or type(error).__name__}") from error
    raise ValueError(f"{path} is not a ZIP archive of torch.save: download it again, or store it as safetensors")


def _read(path: Path, opened: BinaryIO) -> dict[str, TorchTensor]:
    with zipfile.ZipFile(opened) as archive:
        names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if len(names) != 1:
            raise ValueError(f"{len(names)} pickles in the archive")
        with archive.open(names[0]) as file:
            content = file.read(_MAX_PICKLE_BYTES + 1)
        _check_pickle(content)
        storages = _Storages(path, archive, names[0].removesuffix("data.pkl"))
        found = _Unpickler(io.BytesIO(content), storages).load()
        if not isinstance(found, dict) or not all(isinstance(value, TorchTensor) for value in found.values()):
            raise ValueError("it holds other things than tensors by name")
        return {str(name): value for name, value in found.items()}


def _check_pickle(content: bytes) -> None:
    """Raises ValueError for what would make the unpickler ask for much memory: long values that are not there, and
    places in its memo that are far beyond its end."""
    if len(content) > _MAX_PICKLE_BYTES:
        raise ValueError(f"its pickle has more than {_MAX_PICKLE_BYTES} bytes")
    for operation, value, _ in pickletools.genops(content):  # reads the values, too
        if operation.name in _MEMO_WRITES and (not isinstance(value, int) or value > len(content)):
            raise ValueError(f"its pickle has no room for memo {shown(value)}")


class _Storages:
    """The raw buffers of the archive. They are stored, not compressed."""

    def __init__(self, path: Path, archive: zipfile.ZipFile, prefix: str) -> None:
        self._file, self._archive, self._prefix = LocalFile(path), archive, prefix

    def find(self, key: str, dtype: str, count: int) -> _Storage:
        name = f"{self._prefix}data/{key}"
        try:
            entry = self._archive.getinfo(name)
        except KeyError as error:
            raise ValueError(f"it lacks the buffer {shown(name)}: download it again") from error
        size = count * np.dtype(DTYPES[dtype]).itemsize
        if entry.compress_type != zipfile.ZIP_STORED or not 0 <= size <= entry.file_size:
            raise ValueError(f"the buffer {shown(name)} has {entry.file_size} bytes and should have {shown(size)}")
        with self._archive.open(entry):  # checks that it is not encrypted and overlaps no other entry
            pass
        head = entry.header_offset + _LOCAL_HEADER_BYTES
        lengths = self._file.read_range(head - 4, head).view("<u2")
        return _Storage(self._file, dtype, head + int(lengths.sum()), count)


@dataclass(frozen=True)
class _Storage(_Built):
    file: LocalFile
    dtype: str
    start: int  # in bytes, in the file
    count: int  # number of values


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, storages: _Storages) -> None:
        super().__init__(file)
        self._storages = storages

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _TYPES:
            return name
        allowed = {
            ("collections", "OrderedDict"): OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): _tensor,
            ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
        }
        if (module, name) not in allowed:
            raise ValueError(f"it needs {shown(f'{module}.{name}')}, which is not read: store it as safetensors")
        return allowed[module, name]

    def persistent_load(self, pid: Any) -> _Storage:
        kind, type_name, key, _, count = pid
        if kind != "storage" or type_name not in _TYPES:
            raise ValueError(f"it holds {shown(kind)} of type {shown(type_name)}, which is not read")
        return self._storages.find(str(key), _TYPES[type_name], int(count))


def _tensor(storage: _Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any) -> TorchTensor:
    np.broadcast_to(0, shape)  # an error where NumPy has no arrays of this shape
    end = offset + _extent(shape, strides)
    if min((offset, *shape, *strides), default=0) < 0 or (0 not in shape and end > storage.count):
        raise ValueError(
            f"a tensor of shape {shown(shape)} and strides {shown(strides)} does not fit into its buffer of "
            f"{storage.count} values"
        )
    start = storage.start + offset * np.dtype(DTYPES[storage.dtype]).itemsize
    return TorchTensor(storage.file, storage.dtype, tuple(shape), start, tuple(strides))


def _extent(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """The number of values from the first one of a tensor to its last one."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
