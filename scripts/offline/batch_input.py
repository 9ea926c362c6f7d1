"""The input of a batch run: a file of lines, or a pipe."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Self

from model.inputs.paths import Place
from model.inputs.remote import RemotePath
from server.batches.batch_file import numbered_lines

STDIN = Path("-")


class BatchInput:
    """The lines of a batch file. They can be read several times.

    The content of a pipe is copied to a temporary file. Opening such an input waits until the pipe's writer ends.

    Args:
        path: "-" is the standard input. A file in a bucket is copied to a temporary file.

    Raises:
        ValueError: `path` is a folder.
        OSError: the file cannot be read.
    """

    def __init__(self, path: Place) -> None:
        self._path = path
        if isinstance(path, RemotePath):
            self._file: BinaryIO = _downloaded(path)
            self._status, self._start = os.fstat(self._file.fileno()), 0
            return
        if path != STDIN and path.is_dir():
            raise ValueError(f"--input {path} is a folder: name a file of JSON lines")
        self._file = open(0, "rb", closefd=False) if path == STDIN else path.open("rb")  # noqa: SIM115
        status = os.fstat(self._file.fileno())
        self._status = status
        if not stat.S_ISREG(status.st_mode):
            try:
                self._file = _copied(self._file)
            except BaseException:
                self._file.close()
                raise
        self._start = self._file.tell()  # the shell may have read a part of the standard input

    def check_is_none_of(self, paths: Iterable[Path]) -> None:
        """Raises ValueError if one of the output `paths` is this file, directly or through links."""
        for path in paths:
            if path.exists() and os.path.samestat(self._status, path.stat()):
                raise ValueError(f"--input {self._path} is the file {path}, which this run would write: name another")

    def numbered_lines(self) -> Iterator[tuple[int, str]]:
        """The lines that are not blank, with their numbers from 1."""
        self._file.seek(self._start)
        return numbered_lines(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()


def _downloaded(file: RemotePath) -> BinaryIO:
    if file.is_dir():
        raise ValueError(f"--input {file} is a folder: name a file of JSON lines")
    with tempfile.TemporaryDirectory(prefix="pallas-serve-") as folder:
        copy = Path(folder) / "input"
        file.copy_to(copy)
        return copy.open("rb")  # readable to its end without a name


def _copied(pipe: BinaryIO) -> BinaryIO:
    os.set_blocking(pipe.fileno(), True)  # another program may have left a shared terminal non-blocking
    copy = tempfile.TemporaryFile("w+b", prefix="pallas-serve-")  # noqa: SIM115
    try:
        with pipe:
            shutil.copyfileobj(pipe, copy)
        copy.seek(0)
    except BaseException:
        copy.close()
        raise
    return copy
