"""Finds the fault in a file that is not safetensors or incomplete, and the remedy."""

from __future__ import annotations

import json
import struct
from pathlib import Path

_LENGTH = struct.Struct("<Q")  # of the header; stored before it
MAX_HEADER = 100_000_000  # the library's limit
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def fault_in(path: Path, refusal: Exception) -> str:
    """As `fault`, for a file of this machine."""
    with path.open("rb") as file:
        start = file.read(_LENGTH.size)
        (header_size,) = _LENGTH.unpack(start.ljust(_LENGTH.size, b"\0"))
        start += file.read(header_size if header_size <= MAX_HEADER else 256)
    return fault(path.stat().st_size, start, refusal)


def fault(size: int, start: bytes, refusal: Exception) -> str:
    """The rest of a sentence that begins with the file's name.

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
    if size < _LENGTH.size or header_size > MAX_HEADER:
        return f"is not a safetensors file: it begins with {start[:16]!r}"
    if _LENGTH.size + header_size > size:
        return f"has {size} bytes, and its header alone takes {_LENGTH.size + header_size}: download it again"
    described = _described_size(start[_LENGTH.size : _LENGTH.size + header_size])
    if described is not None and described != size:
        return f"has {size} bytes, and its header describes {described}: download it again"
    return f"is not a safetensors file: {refusal}"


def _described_size(header: bytes) -> int | None:
    """Bytes of the whole file according to the offsets in its header; None if the header is malformed."""
    try:
        entries = json.loads(header)
        ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
        return _LENGTH.size + len(header) + max(ends, default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return None
