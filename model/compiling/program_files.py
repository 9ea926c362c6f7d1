"""Files of programs on disk: one folder for each fingerprint, written as a whole and read with a checksum."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import time
from pathlib import Path

logger = logging.getLogger(__name__)

_KEPT_SETS = 32  # folders of programs; the one that was not used for the longest time is deleted first
_IN_USE_S = 3600.0  # a folder that was used so recently stays: another start may be at it
_DIGEST_SIZE = hashlib.sha256().digest_size


class ProgramFiles:
    """The files of the programs of one fingerprint.

    Args:
        folder: of the programs of all fingerprints; made if absent. Raises OSError if it cannot be.
        fingerprint: of all that decides the programs besides what `key` is made from.
        kind: what the files hold, in words for messages, such as "traced program".
        suffix: of the files' names.
        mode: of the folders that are made.
    """

    def __init__(self, folder: Path, fingerprint: str, *, kind: str, suffix: str, mode: int = 0o777) -> None:
        self.folder = folder / fingerprint
        self._kind = kind
        self._suffix = suffix
        folder.mkdir(parents=True, exist_ok=True, mode=mode)
        self.folder.mkdir(exist_ok=True, mode=mode)
        os.utime(self.folder)
        _delete_unused(folder)

    def path(self, *key: object) -> Path:
        """The file of the program that `key` identifies. The `repr` of each object shows all its values."""
        return self.folder / f"{hashlib.sha256(repr(key).encode()).hexdigest()[:32]}{self._suffix}"

    def read(self, path: Path) -> bytes | None:
        """None if there is no such file, or if it is not as it was written, which is a warning."""
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        digest, program = content[:_DIGEST_SIZE], content[_DIGEST_SIZE:]
        if hashlib.sha256(program).digest() != digest:
            logger.warning("%s is damaged: the %s is made again", path, self._kind)
            return None
        return program

    def write(self, path: Path, program: bytes | bytearray) -> None:
        """Replaces the file as a whole: several servers may start at once. A failure is a warning."""
        part = path.with_suffix(f".{os.getpid()}")
        try:
            part.write_bytes(hashlib.sha256(program).digest() + program)
            part.replace(path)
        except OSError as error:
            logger.warning("a %s cannot be kept: %s", self._kind, error)


def _delete_unused(folder: Path) -> None:
    last_used = sorted(((path.stat().st_mtime, path) for path in folder.iterdir()), reverse=True)
    for used_s, path in last_used[_KEPT_SETS:]:
        if used_s < time.time() - _IN_USE_S:
            shutil.rmtree(path, ignore_errors=True)  # another start may be deleting it, too
