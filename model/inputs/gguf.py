"""The head of a GGUF file, llama.cpp's format: its metadata, and the places of its tensors.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The reader of the package `gguf` takes 15 s for
Llama 3's vocabulary, this one 0.2 s. The bytes of the tensors are decoded in `model.loading`.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from model.inputs.json_file import check_is_file
from model.inputs.limits import MAX_TOKENIZER_BYTES, MAX_VOCAB_SIZE
from model.inputs.paths import Place
from model.inputs.words import shown

SUFFIX = ".gguf"
VERSIONS = (2, 3)
MAX_ENTRIES = 1 << 16  # of the metadata, and as many tensors
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
FIRST_BYTES = 1 << 24  # of a file; those of Llama 3 have a head of 8 MB
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5  # types of tokens in `tokenizer.ggml.token_type`
_MAGIC = b"GGUF"
_PART_NAME = re.compile(r"(.+-)(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)
# The types of metadata by their numbers.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies."""

    path: Path  # the file
    shape: tuple[int, ...]  # rows first
    type: int  # GGML's number of it
    offset: int  # in bytes, from the start of the file


@dataclass(frozen=True, kw_only=True)
class GgufFile:
    """A file's head. With a split file, that of the first part, and the tensors of all parts."""

    path: Path
    metadata: Mapping[str, Any]  # arrays are lists
    tensors: Mapping[str, GgufTensor]  # in the order of the file
    start: int  # of the first tensor, in bytes from the start of the file
    alignment: int  # of every tensor, in bytes
    others: tuple[GgufFile, ...] = ()  # the other parts

    @classmethod
    def read(cls, path: Path) -> GgufFile:
        """Reads the head of the file, or those of all parts of a split file.

        Args:
            path: of a split file, that of the first part.

        Raises:
            ValueError: it is no file, not GGUF, not the first part, of another version, or cut off within its head. Or
                another part is missing or damaged.
            OSError: it cannot be opened.
        """
        first, *others = (cls._read_one(part) for part in parts_of(path))
        count = first.metadata.get("split.count", 1)
        if count not in (0, 1, 1 + len(others)):
            raise ValueError(
                f"{path} is one of {shown(count)} parts: their names must end as llama-gguf-split writes them "
                f"(-00001-of-{shown(count):0>5}.gguf), or join them with llama-gguf-split --merge"
            )
        if not others:
            return first
        for number, part in enumerate((first, *others)):
            if (stated := part.metadata.get("split.no")) != number:
                raise ValueError(f"{part.path}: split.no={shown(stated)} is not {number}: it is a part of another file")
        tensors = {name: tensor for part in (first, *others) for name, tensor in part.tensors.items()}
        if len(tensors) != (total := first.metadata.get("split.tensors.count")):
            raise ValueError(f"{path}: its parts have {len(tensors)} tensors of different names, not {shown(total)}")
        return replace(first, tensors=tensors, others=tuple(others))

    @classmethod
    def _read_one(cls, path: Path) -> GgufFile:
        check_is_file(path)
        with path.open("rb") as file:  # not mapped: another program may write it anew at any time
            data = file.read(FIRST_BYTES)
            if not data.startswith(_MAGIC):
                raise ValueError(f"{path} is not a GGUF file: it does not begin with {_MAGIC.decode()}")
            while True:
                try:
                    return _read(path, data)
                except struct.error as error:
                    if not (more := file.read(min(len(data), MAX_TOKENIZER_BYTES - len(data)))):
                        raise ValueError(f"{path} is cut off within its head") from error
                    data += more
                except ValueError as error:
                    raise ValueError(f"{path}: {error}") from error

    def floats(self, name: str) -> tuple[float, ...] | None:
        """The values of a small tensor of one dimension in float32; None where there is no such tensor."""
        tensor = self.tensors.get(name)
        if tensor is None:
            return None
        if tensor.type != 0 or len(tensor.shape) != 1 or tensor.shape[0] > MAX_ENTRIES:
            raise ValueError(f"{self.path}: {name} is not a short list of float32 values")
        layout = struct.Struct(f"<{tensor.shape[0]}f")
        if tensor.offset + layout.size > tensor.path.stat().st_size:
            raise ValueError(f"{tensor.path} is cut off before the end of {name}")
        with tensor.path.open("rb") as file:
            file.seek(tensor.offset)
            return layout.unpack(file.read(layout.size))


def is_gguf(path: Place) -> bool:
    """Whether the path names a GGUF file."""
    return path.suffix.lower() == SUFFIX and not path.is_dir()


def parts_of[P: Place](path: P) -> list[P]:
    """The file, or all parts of a split file whose first part it is. ValueError if it is another part, or if parts are
    missing."""
    named = _PART_NAME.fullmatch(path.name)
    if named is None:
        return [path]
    start, number, count, suffix = named.groups()
    if int(number) != 1:
        raise ValueError(
            f"{path} is part {int(number)} of a split file: name its first part, {start}00001-of-{count}{suffix}"
        )
    parts = [path.with_name(f"{start}{part:05}-of-{count}{suffix}") for part in range(1, int(count) + 1)]
    missing = [part.name for part in parts[1:] if not part.exists()]
    if missing:
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        raise ValueError(
            f"{path} is one of {int(count)} parts, of which these are missing: {', '.join(missing[:8])}{more}"
        )
    return [path, *parts[1:]]  # type: ignore[list-item]


def _read(path: Path, data: bytes) -> GgufFile:
    cursor = _Cursor(data, len(_MAGIC))
    version = cursor.number("I")
    if version not in VERSIONS:
        raise ValueError(f"GGUF version {version} is not supported (only {' and '.join(map(str, VERSIONS))})")
    num_tensors, num_entries = cursor.count("Q"), cursor.count("Q")
    metadata = dict(cursor.distinct(num_entries, lambda: cursor.value(cursor.number("I"))))
    described = dict(cursor.distinct(num_tensors, cursor.tensor))
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment <= MAX_ALIGNMENT or alignment.bit_count() != 1:
        raise ValueError(f"general.alignment={shown(alignment)} is not a power of two up to {MAX_ALIGNMENT}")
    start = -(-cursor.position // alignment) * alignment
    tensors = {name: GgufTensor(path, shape, type, start + offset) for name, (shape, type, offset) in described.items()}
    return GgufFile(path=path, metadata=metadata, tensors=tensors, start=start, alignment=alignment)


class _Cursor:
    """Reads value after value. struct.error if the file ends too early."""

    def __init__(self, data: bytes, position: int):
        self._data = data
        self.position = position

    def number(self, code: str) -> Any:
        return self._numbers(code, 1)[0]

    def count(self, code: str) -> int:
        found = self.number(code)
        if found > MAX_ENTRIES:
            raise ValueError(f"its head counts {found} entries; at most {MAX_ENTRIES} are read")
        return int(found)

    def _numbers(self, code: str, count: int) -> tuple[Any, ...]:
        if count > MAX_VOCAB_SIZE:
            raise ValueError(f"an array of its metadata has {count} elements; at most {MAX_VOCAB_SIZE} are read")
        layout = struct.Struct(f"<{count}{code}")
        found = layout.unpack_from(self._data, self.position)
        self.position += layout.size
        return found

    def strings(self, count: int) -> list[str]:
        """The loop is short because a vocabulary has hundreds of thousands of strings."""
        data, position, length_at, end = self._data, self.position, struct.Struct("<Q").unpack_from, len(self._data)
        found = []
        for _ in range(count):
            start = position + 8
            position = start + length_at(data, position)[0]
            if position > end:
                raise struct.error
            found.append(data[start:position].decode())
        self.position = position
        return found

    def value(self, type: int) -> Any:
        if type == _STRING:
            return self.strings(1)[0]
        if type in _NUMBERS:
            return self.number(_NUMBERS[type])
        if type != _ARRAY:
            raise ValueError(f"its metadata holds values of an unknown type, {type}")
        element, count = self.number("I"), self.number("Q")
        if element == _STRING:
            return self.strings(count)
        if element not in _NUMBERS:
            raise ValueError(f"its metadata holds arrays of a type that is not read, {element}")
        return list(self._numbers(_NUMBERS[element], count))

    def tensor(self) -> tuple[tuple[int, ...], int, int]:
        """Shape, type and offset."""
        if not 1 <= (dimensions := self.number("I")) <= MAX_DIMENSIONS:
            raise ValueError(f"a tensor has {dimensions} dimensions; from 1 to {MAX_DIMENSIONS} are read")
        shape = tuple(reversed(self._numbers("Q", dimensions)))
        return shape, self.number("I"), self.number("Q")

    def distinct[T](self, count: int, read: Callable[[], T]) -> list[tuple[str, T]]:
        """`count` names, each with the value that follows it. ValueError if a name occurs twice."""
        found = [(self.strings(1)[0], read()) for _ in range(count)]
        names = [name for name, _ in found]
        if len(set(names)) < len(names):
            (repeated, _), *_ = Counter(names).most_common(1)
            raise ValueError(f"its head names {shown(repeated)} twice")
        return found
