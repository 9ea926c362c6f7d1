"""Files of programs on a disk or in a bucket. Each fingerprint has a folder. A file is written atomically and has a
checksum.

Reading an executable runs code from its file. So a folder of executables must belong to this user, and others must not
be able to write to it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from model.inputs.paths import Place, write_whole
from model.inputs.private_folders import PRIVATE, make_folder
from model.inputs.remote import RemotePath

logger = logging.getLogger(__name__)

_KEPT_SETS = 32  # folders of programs that are kept; the least recently used is deleted first
_IN_USE_S = 3600.0  # a folder that was used more recently stays: another start may be using it
_DIGEST_SIZE = hashlib.sha256().digest_size
_WRITTEN_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class ProgramFiles:
    """The files of the programs of one fingerprint.

    Args:
        folder: the folder of the programs of all fingerprints; made if absent. If it cannot be written to, there is a
            warning, and its files are only read. A folder in a bucket is listed once, and nothing is deleted there.
        fingerprint: the digest of all that decides the programs, other than the `key` of `path`.
        kind: what the files hold, in words for messages, such as "traced program".
        suffix: the suffix of the files' names.
        private_to: the flag that names a local folder to which only this user may write (`check_private`); None: others
            may write to it.

    Raises:
        ValueError: the folder is in a bucket that cannot be read, or another user could write to it.
    """

    def __init__(
        self, folder: Place, fingerprint: str, *, kind: str, suffix: str, private_to: str | None = None
    ) -> None:
        self.folder = folder / fingerprint
        self._kind = kind
        self._suffix = suffix
        self._private_to = private_to
        self.keeps = True  # False: the folder cannot be written to
        self._listed: set[str] | None = None  # the files of a folder in a bucket
        if isinstance(folder, RemotePath):
            self._listed = {path.name for path in (folder / fingerprint).glob(f"*{suffix}")}
            return
        local = folder / fingerprint
        try:
            make_folder(local, 0o777 if private_to is None else PRIVATE)
            os.utime(local)
            _delete_unused(folder)
        except OSError as error:
            self.keeps = False
            logger.warning("%ss cannot be kept: %s", kind, error)
        for path in (folder, local):
            if private_to is not None and path.is_dir():
                check_private(path, private_to)

    def path(self, *key: object) -> Place:
        """The file of the program that `key` identifies. The `repr` of each object in `key` must show all its
        values."""
        return self.folder / f"{hashlib.sha256(repr(key).encode()).hexdigest()[:32]}{self._suffix}"

    def has(self, path: Place) -> bool:
        """Whether the file is there."""
        return path.is_file() if self._listed is None else path.name in self._listed

    def read(self, path: Place) -> bytes | None:
        """The program in the file; None if there is no such file. If the file is damaged, could have been written by
        others or cannot be read, there is a warning, and the result is None."""
        try:
            if not self.has(path):
                return None
            if self._private_to is not None and isinstance(path, Path):
                check_private(path, self._private_to)
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            logger.warning("the %s is made again: %s", self._kind, error)
            return None
        digest, program = content[:_DIGEST_SIZE], content[_DIGEST_SIZE:]
        if hashlib.sha256(program).digest() != digest:
            logger.warning("%s is damaged: the %s is made again", path, self._kind)
            return None
        return program

    def write(self, path: Place, program: bytes | bytearray) -> None:
        """Replaces the file atomically, because several servers may start at once. A failure is a warning."""
        if not self.keeps:
            return
        try:
            write_whole(path, hashlib.sha256(program).digest() + program)
        except (OSError, ValueError) as error:
            logger.warning("a %s cannot be kept: %s", self._kind, error)
            return
        if self._listed is not None:
            self._listed.add(path.name)

    def link(self, path: Place, other: Path) -> None:
        """Makes `path` a hard link to `other`, the file of a program of another fingerprint. A failure is a warning."""
        assert isinstance(path, Path)
        named = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            named.hardlink_to(other)
            named.replace(path)
        except OSError as error:
            logger.warning("a %s cannot be kept: %s", self._kind, error)
        finally:
            named.unlink(missing_ok=True)  # a link to the same file is not replaced

    def delete_links(self, other: Path) -> None:
        """Deletes the files that `link` has linked to `other`."""
        for path in self._files():
            with suppress(FileNotFoundError):
                if path.samefile(other):
                    path.unlink()

    def delete_unlinked(self) -> None:
        """Deletes the files that have no other link, except those that a start has just made."""
        for path in self._files():
            with suppress(FileNotFoundError):  # another start may be deleting it, too
                status = path.stat()
                if status.st_nlink == 1 and status.st_mtime < time.time() - _IN_USE_S:
                    path.unlink()

    def _files(self) -> Iterable[Path]:
        return self.folder.glob(f"*{self._suffix}") if isinstance(self.folder, Path) else ()


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


def _delete_unused(folder: Path) -> None:
    last_used = sorted(((path.stat().st_mtime, path) for path in folder.iterdir()), reverse=True)
    for used_s, path in last_used[_KEPT_SETS:]:
        if used_s < time.time() - _IN_USE_S:
            shutil.rmtree(path, ignore_errors=True)  # another start may be deleting it, too
