"""Folders of this machine that belong to this user, and their files. Other users may not write to these folders, or may
not even enter them."""

from __future__ import annotations

import math
import os
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

PRIVATE = 0o700  # of a folder
_WRITTEN_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_IN_USE_S = 3600.0  # a file that was used more recently is not deleted: another start may be using it


def make_folder(folder: Path, mode: int = PRIVATE) -> None:
    """Makes the folder and those above it, all with the same mode. Raises OSError if it cannot be made."""
    for path in (*reversed(folder.parents), folder):
        path.mkdir(exist_ok=True, mode=mode)


def check_closed(folder: Path, flag: str) -> None:
    """Raises ValueError if another user owns the folder, or may enter or list it. `flag` names the folder."""
    status = folder.stat()
    if status.st_uid != os.geteuid():
        raise ValueError(f"{flag} {folder}: it belongs to another user. Name a folder of your own")
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise ValueError(f"{flag} {folder}: other users may enter it. Close it with `chmod 700 {folder}`")


def check_private(path: Path, flag: str) -> None:
    """Raises ValueError if another user owns the file or folder, or could write to it. `flag` is the flag that names
    the folder."""
    status = path.stat()
    if status.st_uid != os.geteuid():
        raise ValueError(
            f"{flag}: {path} belongs to another user, who could run code here through it: name a folder of your own"
        )
    if status.st_mode & _WRITTEN_BY_OTHERS:
        raise ValueError(
            f"{flag}: other users may write to {path}, and could run code here through it: `chmod 700` it if you trust "
            "what it holds, or name another folder"
        )


@contextmanager
def writing_whole(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A file that gets its name when the context ends, and not at all after an error: a reader sees the old content or
    the new one. `mode` is that of `os.open`."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")  # several processes may write the same
    try:
        with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def delete_unused(files: Iterable[Path], *, max_bytes: float = math.inf, max_files: float = math.inf) -> None:
    """Deletes the least recently used files until the others have at most `max_bytes` and are at most `max_files`. A
    file that was used within the last hour stays."""
    used: list[tuple[float, int, Path]] = []
    for path in files:
        with suppress(FileNotFoundError):  # another start may be deleting it, too
            status = path.stat()
            used.append((status.st_mtime, status.st_size, path))
    total = 0
    for number, (used_s, size, path) in enumerate(sorted(used, reverse=True), 1):
        total += size
        if (total > max_bytes or number > max_files) and used_s < time.time() - _IN_USE_S:
            path.unlink(missing_ok=True)
