"""The journal of a batch run: its finished records, from which the next run continues."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Self

Key = tuple[int, str]  # a line's number and its digest


class Journal:
    """The finished records of a run, in the order in which they finished, in `OUTPUT.partial` next to the output.

    A record counts as finished when its whole line is in the file, so that the next run can continue one that was
    killed at any moment. One process at a time holds the journal. A journal without records leaves no file behind.

    Raises:
        BlockingIOError: another process holds it. Nothing has been changed then.
        ValueError: the file is not a journal.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = _open_locked(path)
        self._places: dict[Key, tuple[int, int]] = {}  # -> offset, size
        self._end = 0
        self._is_forgotten = False  # the file still holds records that do not count
        try:
            self._read_back()
        except BaseException:
            self._file.close()
            raise

    @property
    def is_empty(self) -> bool:
        return not self._places

    def __contains__(self, key: Key) -> bool:
        return key in self._places

    def forget(self) -> None:
        """Starts over. Earlier records stay in the file until this run adds its first one."""
        self._places.clear()
        self._is_forgotten = True

    def add(self, number: int, line_digest: str, record: dict[str, Any]) -> None:
        """Adds the record of a line. It outlives this process once this returns."""
        if self._is_forgotten:
            self._file.truncate(0)
            self._end, self._is_forgotten = 0, False
        raw = json.dumps({"line": number, "digest": line_digest, "record": record}, ensure_ascii=False).encode() + b"\n"
        self._file.write(raw)
        self._file.flush()
        self._places[number, line_digest] = (self._end, len(raw))
        self._end += len(raw)

    def write_ordered(self, keys: Iterator[Key], output: Path) -> int:
        """Writes the records of `keys`, in that order, to `output`, whole or not at all, and removes the journal.
        Returns how many of them are errors."""
        num_errors = 0
        temporary = ordered_path(output)
        with temporary.open("wb") as file:
            for key in keys:
                offset, size = self._places[key]
                record = json.loads(os.pread(self._file.fileno(), size, offset))["record"]
                response = record["response"]
                num_errors += response is None or response["status_code"] != 200
                file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        temporary.replace(output)
        self._close(remove=True)
        return num_errors

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if not self._file.closed:
            self._close(remove=self._end == 0)

    def _close(self, *, remove: bool) -> None:
        """The file is removed while it is locked: a process that opened it in the meantime sees that it is gone."""
        if remove:
            self._path.unlink()
        self._file.close()

    def _read_back(self) -> None:
        self._file.seek(0)
        for raw in self._file:
            if not raw.endswith(b"\n"):  # torn by whatever ended the last run
                break
            self._places[_key_of(raw, self._path)] = (self._end, len(raw))
            self._end += len(raw)
        self._file.truncate(self._end)


def partial_path(output: Path) -> Path:
    """Where the journal of a run that writes `output` lies."""
    return Path(f"{output}.partial")


def ordered_path(output: Path) -> Path:
    """Where the records are put in order before they become `output`."""
    return Path(f"{output}.ordered")


def _key_of(raw: bytes, path: Path) -> Key:
    try:
        match json.loads(raw):
            case {"line": int(number), "digest": str(line_digest), "record": dict()}:
                return number, line_digest
    except (ValueError, RecursionError):
        pass
    raise ValueError(f"{path} is in the way: it holds something else than the records of an interrupted run")


def _open_locked(path: Path) -> BinaryIO:
    """Opens or creates the file at `path` and locks it. BlockingIOError where another process holds the lock."""
    while True:
        file = path.open("a+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(file, path):
                return file
        except BaseException:
            file.close()
            raise
        file.close()  # between the opening and the locking, the run that held it ended and removed it


def _is_at(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
