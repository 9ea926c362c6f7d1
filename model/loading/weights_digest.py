"""A digest of a checkpoint's content. Two digests are equal only if the models compute the same.

Files of this machine are read completely, several at a time, at the speed of the disk or of SHA-256. Files that the
hub's client has downloaded have their SHA-256 as their name. Objects of a bucket are not read: the digest has their
version, which every upload changes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from model.inputs.gguf import is_gguf, parts_of
from model.inputs.paths import Place
from model.inputs.remote import RemotePath
from model.loading.stored_weights import StoredWeights
from model.loading.tensor_files import files_in

_FILES_AT_ONCE = 8
_SHA256 = re.compile(r"[0-9a-f]{64}")


def weights_digest(stored: StoredWeights) -> str:
    """The digest of the weights and of the config, as hexadecimal SHA-256. Raises OSError or ValueError if they cannot
    be read."""
    return hashlib.sha256(f"{stored.config!r} {files_digest(files_of(stored))}".encode()).hexdigest()


def files_of(stored: StoredWeights) -> list[Place]:
    """The files whose content decides the weights."""
    if stored.is_converted:
        if isinstance(stored.path, RemotePath):
            return [*stored.path.files()]
        return [path for path in stored.path.rglob("*") if not path.is_dir()]
    if is_gguf(stored.path):
        return [*parts_of(stored.path), *stored.merged_files]
    return [*(stored.path / name for name in files_in(stored.path)), *stored.merged_files]


def files_digest(files: Sequence[Place]) -> str:
    """The digest of the names and the content of these files, as hexadecimal SHA-256. Raises OSError or ValueError if
    they cannot be read."""
    with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
        contents = pool.map(_content, files)
        named = sorted((file.name, content) for file, content in zip(files, contents, strict=True))
    return hashlib.sha256(repr(named).encode()).hexdigest()


def _content(file: Place) -> str:
    if isinstance(file, RemotePath):
        return file.version()
    stored = file.resolve()
    if stored.parent.name == "blobs" and _SHA256.fullmatch(stored.name):
        return stored.name
    with stored.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
