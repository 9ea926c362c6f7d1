"""Files of programs on a disk or in a bucket: one folder for each fingerprint, written as a whole and read with a
checksum."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import time
from pathlib import Path

from model.inputs.paths import Place, write_whole
from model.inputs.remote import RemotePath

logger = logging.getLogger(__name__)

_KEPT_SETS = 32  # folders of programs; the one that was not used for the longest time is deleted first
_IN_USE_S = 3600.0  # a folder that was used so recently stays: another start may be at it
_DIGEST_SIZE = hashlib.sha256().digest_size


class ProgramFiles:
    """The files of the programs of one fingerprint.

    Args:
        folder: of the programs of all fingerprints; made if absent. Raises OSError if it cannot be made, and ValueError
            if it is in a bucket that cannot be read. A folder in a bucket is listed once, and nothing is deleted there.
        fingerprint: of all that decides the programs besides what `key` is made from.
        kind: what the files hold, in words for messages, such as "traced program".
        suffix: of the files' names.
        mode: of the folders that are made.
    """

    def __init__(self, folder: Place, fingerprint: str, *, kind: str, suffix: str, mode: int = 0o777) -> None:
        self.folder = folder / fingerprint
        self._kind = kind
        self._suffix = suffix
        self._listed: set[str] | None = None  # the files of a folder in a bucket
        if isinstance(folder, RemotePath):
            self._listed = {path.name for path in (folder / fingerprint).glob(f"*{suffix}")}
            return
        folder.mkdir(parents=True, exist_ok=True, mode=mode)
        local = folder / fingerprint
        local.mkdir(exist_ok=True, mode=mode)
        os.utime(local)
        _delete_unused(folder)

    def path(self, *key: object) -> Place:
        """The file of the program that `key` identifies. The `repr` of each object shows all its values."""
        return self.folder / f"{hashlib.sha256(repr(key).encode()).hexdigest()[:32]}{self._suffix}"

    def has(self, path: Place) -> bool:
        """Whether the file is there."""
        return path.is_file() if self._listed is None else path.name in self._listed

    def read(self, path: Place) -> bytes | None:
        """None if there is no such file, or if it is not as it was written, or cannot be read from a bucket, which is a
        warning."""
        try:
            content = path.read_bytes() if self.has(path) else None
        except FileNotFoundError:
            return None
        except ValueError as error:
            logger.warning("the %s is made again: %s", self._kind, error)
            return None
        if content is None:
            return None
        digest, program = content[:_DIGEST_SIZE], content[_DIGEST_SIZE:]
        if hashlib.sha256(program).digest() != digest:
            logger.warning("%s is damaged: the %s is made again", path, self._kind)
            return None
        return program

    def write(self, path: Place, program: bytes | bytearray) -> None:
        """Replaces the file as a whole: several servers may start at once. A failure is a warning."""
        try:
            write_whole(path, hashlib.sha256(program).digest() + program)
        except (OSError, ValueError) as error:
            logger.warning("a %s cannot be kept: %s", self._kind, error)
            return
        if self._listed is not None:
            self._listed.add(path.name)


def _delete_unused(folder: Path) -> None:
    last_used = sorted(((path.stat().st_mtime, path) for path in folder.iterdir()), reverse=True)
    for used_s, path in last_used[_KEPT_SETS:]:
        if used_s < time.time() - _IN_USE_S:
            shutil.rmtree(path, ignore_errors=True)  # another start may be deleting it, too
