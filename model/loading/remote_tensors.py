"""The tensors of a safetensors file, in an object store or of this machine. Only the bytes that are asked for are read.

The safetensors library maps files of this machine. The format: https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from model.loading.safetensors_fault import MAX_HEADER, fault

_DTYPES: Mapping[str, Any] = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "U16": np.uint16,
    "I16": np.int16,
    "U32": np.uint32,
    "I32": np.int32,
    "U64": np.uint64,
    "I64": np.int64,
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
}
_LENGTH = struct.Struct("<Q")  # of the header; stored before it
_FIRST_BYTES = 1 << 16  # of a file; nearly always with its whole header

Index = tuple[slice, ...]


class File(Protocol):
    """A file whose parts can be read, such as a `RemotePath`."""

    def stat(self) -> Any: ...

    def version(self) -> str: ...

    def read_range(self, start: int, end: int) -> bytearray: ...


@dataclass(frozen=True)
class LocalFile:
    """A file of this machine that is read and not mapped: another program may write it anew at any time, and a process
    that reads the map of a file that has become shorter is killed."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def stat(self) -> Any:
        return self.path.stat()

    def version(self) -> str:
        found = self.path.stat()
        return f"{found.st_ino} {found.st_size} {found.st_mtime_ns}"

    def read_range(self, start: int, end: int) -> bytearray:
        content = bytearray(end - start)
        with self.path.open("rb") as file:
            file.seek(start)
            if file.readinto(content) != len(content):
                raise ValueError(f"{self} has become shorter while it was read: try again")
        return content


class RemoteTensors:
    """One file: its tensors by name.

    Args:
        max_header: bytes of the file's header.

    Raises:
        ValueError: the file is not safetensors, or incomplete.
        FileNotFoundError, ValueError: as `RemotePath`.
    """

    def __init__(self, file: File, *, max_header: int = MAX_HEADER):
        self._file = file
        self._version = file.version()
        size = file.stat().st_size
        start = bytes(file.read_range(0, min(size, _FIRST_BYTES)))
        (header_size,) = _LENGTH.unpack(start[: _LENGTH.size].ljust(_LENGTH.size, b"\0"))
        self._data = _LENGTH.size + header_size
        is_readable = size >= _LENGTH.size and header_size <= min(max_header, size - _LENGTH.size)
        if is_readable and self._data > len(start):
            start += bytes(file.read_range(len(start), self._data))
        try:
            header = json.loads(start[_LENGTH.size : self._data]) if is_readable else None
            self._entries = _checked(header, size - self._data)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file} {fault(size, start, error)}") from error

    def slices(self) -> dict[str, RemoteSlice]:
        """All tensors, without their values."""
        return {
            key: RemoteSlice(self._file, entry["dtype"], tuple(entry["shape"]), self._data + entry["data_offsets"][0])
            for key, entry in self._entries.items()
        }

    def check_unchanged(self) -> None:
        """Raises ValueError if the file is not the one that was opened: its tensors would be of two checkpoints."""
        if self._file.version() != self._version:
            raise ValueError(f"{self._file} changed while it was read: start again")


class _Slice(ABC):
    """One tensor, with those methods of safetensors' slices that are used here. Whole rows are read: a part of a row is
    too short for a request of its own."""

    def __init__(self, dtype: str, shape: tuple[int, ...]):
        self._name = dtype
        self._shape = shape

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def get_dtype(self) -> str:
        return self._name

    def __getitem__(self, index: Any) -> np.ndarray:
        if index is Ellipsis or not self._shape:
            return self._all()
        rows, *others = index if isinstance(index, tuple) else (index,)
        start, stop, _ = rows.indices(self._shape[0])
        return self._rows(start, stop)[(slice(None), *others)]

    @abstractmethod
    def _all(self) -> np.ndarray: ...

    @abstractmethod
    def _rows(self, start: int, stop: int) -> np.ndarray: ...


class RemoteSlice(_Slice):
    """A tensor whose values are in the file."""

    def __init__(self, file: File, dtype: str, shape: tuple[int, ...], start: int):
        super().__init__(dtype, shape)
        self._file = file
        self._start = start  # in bytes, in the file

    def rows(self, start: int, stop: int) -> RowsInMemory:
        """These rows, read now."""
        return RowsInMemory(self._rows(start, stop), start, self._name, self._shape)

    def _all(self) -> np.ndarray:
        return self._rows(0, self._shape[0] if self._shape else 1)

    def _rows(self, start: int, stop: int) -> np.ndarray:
        dtype = np.dtype(_DTYPES[self._name])
        row_bytes = dtype.itemsize * math.prod(self._shape[1:])
        begin = self._start + start * row_bytes
        content = self._file.read_range(begin, begin + max(0, stop - start) * row_bytes)
        shape = (max(0, stop - start), *self._shape[1:]) if self._shape else ()
        return np.frombuffer(content, dtype).reshape(shape)


class RowsInMemory(_Slice):
    """Rows of a tensor that are in memory, at their places in the whole tensor."""

    def __init__(self, values: np.ndarray, first: int, dtype: str, shape: tuple[int, ...]):
        super().__init__(dtype, shape)
        self._values = values
        self._first = first

    def _all(self) -> np.ndarray:
        return self._values

    def _rows(self, start: int, stop: int) -> np.ndarray:
        return self._values[start - self._first : stop - self._first]


def _checked(header: Any, data_bytes: int) -> dict[str, dict[str, Any]]:
    """The entries of the tensors. ValueError if they do not fill the data without gaps."""
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    entries = {key: entry for key, entry in header.items() if key != "__metadata__"}
    end = 0
    for start, stop, num_bytes in sorted(_extents(entries)):
        if start != end or stop - start != num_bytes:
            raise ValueError("the places of its tensors overlap, leave gaps, or do not have the size of their shapes")
        end = stop
    if end != data_bytes:
        raise ValueError(f"its tensors have {end} bytes, and the file has {data_bytes} for them")
    return entries


def _extents(entries: Mapping[str, Any]) -> Iterator[tuple[int, int, int]]:
    """Where each tensor starts and ends, and the bytes that its shape needs."""
    for key, entry in entries.items():
        match entry:
            case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(start), int(stop)]} if (
                dtype in _DTYPES and start >= 0 and all(isinstance(size, int) and size >= 0 for size in shape)
            ):
                yield start, stop, np.dtype(_DTYPES[dtype]).itemsize * math.prod(shape)
            case _:
                raise ValueError(f"its header describes {key!r} in a way that is not read")
