"""The tensors of a safetensors file, in an object store or of this machine. Only the bytes that are asked for are read.

The safetensors library reads no objects of a store, and has no NumPy arrays of FP8. It maps files, and a process that
reads the map of a file that has become shorter is killed. The format: https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from model.inputs.json_file import check_is_file
from model.inputs.paths import Place
from model.inputs.remote import RemotePath

DTYPES: Mapping[str, Any] = {
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
_MAX_HEADER = 100_000_000  # the library's limit
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_FIRST_BYTES = 1 << 16  # of a file; nearly always with its whole header


@dataclass(frozen=True)
class LocalFile:
    """A file of this machine. It is read and not mapped: another program may write it anew at any time."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def stat(self) -> Any:
        return self.path.stat()

    def version(self) -> str:
        found = self.path.stat()
        return f"{found.st_ino} {found.st_size} {found.st_mtime_ns}"

    def read_range(self, start: int, end: int) -> np.ndarray:
        content = np.empty(end - start, np.uint8)
        with self.path.open("rb") as file:
            file.seek(start)
            if file.readinto(content.data) != len(content):
                raise ValueError(f"{self} has become shorter while it was read: try again")
        return content


File = RemotePath | LocalFile


def readable(file: Place) -> File:
    """The file, to be read in parts. Raises ValueError for a pipe or a device, OSError if nothing is there."""
    if isinstance(file, RemotePath):
        return file
    check_is_file(file)
    return LocalFile(file)


class RemoteTensors:
    """One file: its tensors by name.

    Args:
        max_header: bytes of the file's header.

    Raises:
        ValueError: the file is not safetensors, or incomplete.
        OSError, ValueError: as `readable`, or as `RemotePath`.
    """

    def __init__(self, place: Place, *, max_header: int = _MAX_HEADER):
        self.file = file = readable(place)
        self.version = file.version()
        size = file.stat().st_size
        start = bytes(file.read_range(0, min(size, _FIRST_BYTES)))
        (header_size,) = _LENGTH.unpack(start[: _LENGTH.size].ljust(_LENGTH.size, b"\0"))
        self._data = _LENGTH.size + header_size
        is_readable = size >= _LENGTH.size and header_size <= min(max_header, size - _LENGTH.size)
        if is_readable and self._data > len(start):
            start += bytes(file.read_range(len(start), self._data))
        try:
            self._entries, end = _checked(start[_LENGTH.size : self._data] if is_readable else b"")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file} {_fault(size, start, error)}") from error
        if (described := self._data + end) != size:
            raise ValueError(f"{file} has {size} bytes, and its header describes {described}: download it again")

    def slices(self) -> dict[str, RemoteSlice]:
        return {
            key: RemoteSlice(self.file, entry["dtype"], tuple(entry["shape"]), self._data + entry["data_offsets"][0])
            for key, entry in self._entries.items()
        }


@dataclass(frozen=True)
class RemoteSlice:
    """One tensor. Whole rows are read: a part of a row is too short for a request of its own."""

    file: File
    dtype: str  # the format's name
    shape: tuple[int, ...]
    start: int  # in bytes, in the file

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return self.dtype

    def __getitem__(self, index: Any) -> np.ndarray:
        if index is Ellipsis or not self.shape:
            return self._rows(0, self.shape[0] if self.shape else 1)
        index = index if isinstance(index, tuple) else (index,)
        return self.reader(index[0])(index)

    def reader(self, rows: slice) -> Callable[[tuple[slice, ...]], np.ndarray]:
        """Reads these rows now. Returns a function that gives the part of the tensor at an index within them."""
        first, stop, _ = rows.indices(self.shape[0])
        values = self._rows(first, stop)

        def part(index: tuple[slice, ...]) -> np.ndarray:
            start, end, _ = index[0].indices(self.shape[0])
            return values[(slice(start - first, end - first), *index[1:])]

        return part

    def _rows(self, start: int, stop: int) -> np.ndarray:
        dtype = np.dtype(DTYPES[self.dtype])
        row_bytes = dtype.itemsize * math.prod(self.shape[1:])
        begin = self.start + start * row_bytes
        content = self.file.read_range(begin, begin + max(0, stop - start) * row_bytes)
        shape = (max(0, stop - start), *self.shape[1:]) if self.shape else ()
        return np.frombuffer(content, dtype).reshape(shape)


def _checked(content: bytes) -> tuple[dict[str, dict[str, Any]], int]:
    """The entries of the tensors in a header, and the bytes of their data. ValueError if there are gaps in the data."""
    try:
        header = json.loads(content)
    except ValueError as error:
        raise ValueError(f"invalid JSON in its header: {error}") from error
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    entries = {key: entry for key, entry in header.items() if key != "__metadata__"}
    end = 0
    for start, stop, num_bytes in sorted(_extents(entries)):
        if start != end or stop - start != num_bytes:
            raise ValueError("the places of its tensors overlap, leave gaps, or do not have the size of their shapes")
        end = stop
    return entries, end


def _extents(entries: Mapping[str, Any]) -> Iterator[tuple[int, int, int]]:
    """Where each tensor starts and ends, and the bytes that its shape needs."""
    for key, entry in entries.items():
        match entry:
            case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(start), int(stop)]} if (
                dtype in DTYPES and start >= 0 and all(isinstance(size, int) and size >= 0 for size in shape)
            ):
                yield start, stop, np.dtype(DTYPES[dtype]).itemsize * math.prod(shape)
            case _:
                raise ValueError(f"its header describes {key!r} in a way that is not read")


def _fault(size: int, start: bytes, refusal: Exception) -> str:
    """What is wrong with a file that is not safetensors or incomplete, and the remedy, in words that follow its name.

    Args:
        size: of the file, in bytes.
        start: the file's first bytes; with its header, if that can be read.
        refusal: the reader's own error.
    """
    if size == 0:
        return "is empty: download it again"
    if start.startswith(_LFS_POINTER):
        return "is a Git LFS pointer and not the weights: run `git lfs pull` in its folder"
    (header_size,) = _LENGTH.unpack(start[: _LENGTH.size].ljust(_LENGTH.size, b"\0"))
    if size < _LENGTH.size or header_size > _MAX_HEADER:
        return f"is not a safetensors file: it begins with {start[:16]!r}"
    if _LENGTH.size + header_size > size:
        return f"has {size} bytes, and its header alone takes {_LENGTH.size + header_size}: download it again"
    return f"is not a safetensors file: {refusal}"
