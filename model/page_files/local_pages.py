"""Files of pages in a folder of this machine, which several processes may share.

A file is written under another name and then renamed, so no reader sees a part of one. There are no locks: what a
killed process leaves is a file with another name, which a later listing deletes.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from stat import S_ISREG
from typing import BinaryIO

from model.inputs.private_folders import PRIVATE, check_closed, make_folder
from model.page_files.page_index import KeptPage

_ABANDONED_S = 3600.0  # a file that was written so long ago under another name will not get its own
_IDENTITY, _PART = re.compile(r"[0-9a-f]{32}"), re.compile(r"[0-9a-f]{2}")
_PAGE, _UNFINISHED = re.compile(r"[0-9a-f]{32}\.page"), re.compile(r"[0-9a-f]{32}\.page\.[0-9a-f]{16}")


class LocalPages:
    """The files of pages below a folder, which is made for this user alone if it is absent. Other files in it stay as
    they are.

    Args:
        flag: that names the folder, for errors.

    Raises:
        ValueError: the folder cannot be made, is another user's, or is open to others.
    """

    def __init__(self, folder: Path, flag: str) -> None:
        self._folder = folder
        try:
            make_folder(folder)
            check_closed(folder, flag)
        except OSError as error:
            raise ValueError(f"{flag} {folder}: it cannot be made or entered: {error.strerror}") from error

    def listed(self) -> Iterator[KeptPage]:
        """All pages, in any order. Deletes what killed processes have left, and folders that have been empty for long.
        Raises OSError if the folder cannot be listed."""
        for identity in _folders(self._folder, _IDENTITY):
            with suppress(FileNotFoundError):  # another process has deleted it
                parts = _folders(identity, _PART)
                for part in parts:
                    with suppress(FileNotFoundError):
                        yield from _pages(part, identity.name)
                if not parts:
                    _delete_if_old(identity)

    def read(self, name: str, start: bytearray, page: memoryview) -> bool:
        """Fills `start` with the first bytes of the file and `page` with the next. False: the file is too short.

        Raises:
            FileNotFoundError: it is not there.
            OSError: it cannot be read.
        """
        with open(self._folder / name, "rb", opener=_open_at_once) as file:
            return file.readinto(start) == len(start) and file.readinto(page) == len(page)

    def write(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        """Writes the file whole or not at all. Raises OSError, also if the folder is not there any more."""
        path = self._folder / name
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
        try:
            with _created(temporary) as file:
                for part in parts:
                    file.write(part)
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):  # the first error is the one to know; a later listing deletes the file
                temporary.unlink()
            raise

    def touch(self, name: str) -> bool:
        """Notes that a file is used now. False: it is not there."""
        try:
            os.utime(self._folder / name)
        except OSError as error:
            return error.errno != errno.ENOENT  # in a folder that may only be read, files keep their times
        return True

    def delete(self, name: str) -> None:
        """Deletes a file that may have gone already. Raises OSError."""
        (self._folder / name).unlink(missing_ok=True)


def _open_at_once(path: str, flags: int) -> int:
    """Does not wait for a writer if the file has become a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


def _folders(folder: Path, names: re.Pattern[str]) -> list[Path]:
    with os.scandir(folder) as entries:
        return [
            folder / entry.name
            for entry in entries
            if names.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        ]


def _pages(part: Path, identity: str) -> Iterator[KeptPage]:
    is_empty = True
    with os.scandir(part) as entries:
        for entry in entries:
            is_empty = False
            with suppress(FileNotFoundError):  # another process has deleted it
                status = entry.stat(follow_symlinks=False)
                if _PAGE.fullmatch(entry.name) and S_ISREG(status.st_mode):
                    yield KeptPage(f"{identity}/{part.name}/{entry.name}", status.st_size, status.st_mtime)
                elif _UNFINISHED.fullmatch(entry.name) and _is_old(status):
                    with suppress(OSError):  # the folder may only be read
                        os.unlink(entry.path)
    if is_empty:
        _delete_if_old(part)


def _delete_if_old(folder: Path) -> None:
    """Deletes an empty folder, unless a page may be on its way there."""
    with suppress(OSError):  # it is not empty any more, or may not be deleted
        if _is_old(folder.stat()):
            folder.rmdir()


def _is_old(status: os.stat_result) -> bool:
    return status.st_mtime < time.time() - _ABANDONED_S


def _created(path: Path) -> BinaryIO:
    try:
        return path.open("xb")
    except FileNotFoundError:  # it is the first of its folder
        for folder in (path.parent.parent, path.parent):
            folder.mkdir(mode=PRIVATE, exist_ok=True)
        return path.open("xb")
