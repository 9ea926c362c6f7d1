"""Files of programs that starts keep for later starts, in a folder of this machine or of a bucket. A file is written
atomically and has a checksum. The least recently used files of a folder are deleted.

Reading a compiled program runs code from its file. So a folder of this machine must belong to this user, and others
must not be able to write to it or to a file in it. In a bucket this is not checked.
"""

from __future__ import annotations

import hashlib
import logging
import os
from contextlib import suppress
from pathlib import Path

from model.inputs.paths import Place, write_whole
from model.inputs.private_folders import check_private, delete_unused, make_folder

logger = logging.getLogger(__name__)

SUFFIXES = (".stablehlo", ".exe", ".xla", ".passed")
_MAX_BYTES = 4 << 30  # of the files with these suffixes in a folder
_DIGEST_SIZE = hashlib.sha256().digest_size
_MODE = 0o600  # of a file


class KeptFiles:
    """The files of one folder, by their paths inside it.

    Args:
        folder: made if absent. A folder in a bucket is not bounded.

    Raises:
        ValueError: another user could write to the folder, or its bucket cannot be used.
    """

    def __init__(self, folder: Place) -> None:
        self.folder = folder
        self._is_bounded = False
        self._is_given_up = False
        self._listed: dict[str, set[str]] = {}  # folders of a bucket -> the files that are there
        if not isinstance(folder, Path):
            folder.check_bucket()
            return
        try:
            make_folder(folder)
        except OSError as error:
            self._warn(error)
        else:
            check_private(folder, "--compile-cache")

    def has(self, name: str) -> bool:
        """Whether there is such a file. A folder of a bucket is listed once."""
        path = self.folder / name
        if isinstance(path, Path):
            return path.is_file()
        listed = self._listed.get(str(path.parent))
        if listed is None:
            listed = self._listed[str(path.parent)] = {found.name for found in path.parent.glob("*")}
        return path.name in listed

    def read(self, name: str) -> bytes | None:
        """The content of the file; None if there is no such file. If the file is damaged, could have been written by
        others or cannot be read, there is a warning, and the result is None."""
        path = self.folder / name
        try:
            if isinstance(path, Path):
                check_private(path, "--compile-cache")
            content = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            logger.warning("a program is made again: %s", error)
            return None
        digest, program = content[:_DIGEST_SIZE], content[_DIGEST_SIZE:]
        if hashlib.sha256(program).digest() != digest:
            logger.warning("%s is damaged: the program is made again", path)
            return None
        if isinstance(path, Path):
            with suppress(OSError):  # the folder is read-only
                os.utime(path)
        return program

    def write(self, name: str, program: bytes | bytearray) -> None:
        """Replaces the file atomically, because several servers may start at once. A failure is a warning. After one of
        a folder of this machine, nothing is written any more."""
        if self._is_given_up:
            return
        path = self.folder / name
        try:
            if isinstance(path, Path):
                make_folder(path.parent)
            write_whole(path, hashlib.sha256(program).digest() + program, _MODE)
        except (OSError, ValueError) as error:
            self._warn(error)
            return
        if isinstance(self.folder, Path) and not self._is_bounded:
            self._is_bounded = True
            files = (path for path in self.folder.rglob("*") if path.suffix in SUFFIXES)
            delete_unused(files, max_bytes=_MAX_BYTES)

    def delete(self, name: str) -> None:
        with suppress(OSError):  # the folder is read-only
            (self.folder / name).unlink(missing_ok=True)

    def _warn(self, error: Exception) -> None:
        self._is_given_up = isinstance(self.folder, Path)
        logger.warning("programs cannot be kept: %s", error)
