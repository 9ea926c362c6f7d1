"""Copies of files that libraries can read from this machine only: tokenizers, templates, GGUF files.

A copy has its own folder for each URL and each version of the files, so it never changes. Several processes may ask for
the same one at once.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from model.inputs.limits import MAX_TOKENIZER_BYTES
from model.inputs.remote import RemotePath

TOOL_USE_FILE = "additional_chat_templates/tool_use.jinja"
SMALL_FILES = ("*.json", "*.jinja", "tokenizer.model", TOOL_USE_FILE)
_IN_USE_S = 3600.0  # a copy that was used so recently stays: another start may be reading it
_FILES_AT_ONCE = 8


def fetched_folder(
    folder: RemotePath,
    copies: Path,
    patterns: Sequence[str] = SMALL_FILES,
    max_bytes: int | None = MAX_TOKENIZER_BYTES,
) -> Path:
    """The folder with copies of those files in `folder` whose names match. A pattern with a slash is a path.

    Args:
        copies: where all copies are kept.

    Raises:
        FileNotFoundError, ValueError: as `RemotePath`; also if a file is longer than `max_bytes`.
    """
    named = [pattern for pattern in patterns if "/" not in pattern]
    entries = {entry.name: entry for entry in folder.iterdir() if any(Path(entry.name).match(one) for one in named)}
    entries |= {pattern: folder / pattern for pattern in patterns if pattern not in named}
    with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
        are_files = pool.map(RemotePath.is_file, entries.values())
        files = {name: file for (name, file), is_file in zip(entries.items(), are_files, strict=True) if is_file}
    return _copied(folder, files, copies, max_bytes=max_bytes)


def fetched_parts(parts: Sequence[RemotePath], copies: Path) -> Path:
    """The copy of the first of these files of any length, with those of the others next to it. Otherwise as
    `fetched_folder`."""
    first = parts[0]
    return _copied(first, {part.name: part for part in parts}, copies, max_bytes=None) / first.name


def _copied(url: RemotePath, files: Mapping[str, RemotePath], copies: Path, max_bytes: int | None) -> Path:
    """`files`: by their paths in the folder of copies."""
    with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
        versions = list(pool.map(RemotePath.version, files.values()))
        sizes = list(pool.map(lambda file: file.stat().st_size, files.values()))
        for file, size in zip(files.values(), sizes, strict=True):
            if max_bytes is not None and size > max_bytes:
                raise ValueError(f"{file} has {size} bytes; at most {max_bytes} are read")
        of_url = copies / _digest(str(url))
        found = of_url / _digest(*(f"{name} {version}" for name, version in zip(files, versions, strict=True)))
        if found.is_dir():
            os.utime(found)
            return found
        of_url.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix="part-", dir=of_url))
        try:
            for name in files:
                (part / name).parent.mkdir(exist_ok=True)
            list(pool.map(lambda item: item[1].copy_to(part / item[0]), files.items()))
            try:
                part.rename(found)
            except OSError:
                if not found.is_dir():  # another process has been quicker
                    raise
        finally:
            shutil.rmtree(part, ignore_errors=True)
    for other in of_url.iterdir():
        if other != found and other.stat().st_mtime < time.time() - _IN_USE_S:
            shutil.rmtree(other, ignore_errors=True)  # another start may be deleting it, too
    return found


def _digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:32]
