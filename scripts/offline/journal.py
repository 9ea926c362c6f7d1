"""The journal of a batch run: its finished records. The next run continues from them."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Self

Key = tuple[int, str]  # a line's number and its digest


class Journal:
    """The finished records of a run, in the order in which they finished, in `OUTPUT.partial` next to the output.

    A record is finished when its whole line is in the file. The next run can therefore continue after a kill at any
    moment. Only one process at a time can hold the journal. A journal without records leaves no file.

    Raises:
        BlockingIOError: another process holds the journal; nothing was changed.
        ValueError: the file is not a journal.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = _open_locked(path)
        self._places: dict[Key, tuple[int, int]] = {}  # -> offset, size
        self._end = 0
        self._is_finished = False
        self._objection: str | None = None  # why this run must not go on
        self._is_forgotten = False  # the file still has records of an earlier run, which do not count
        try:
            self._read_back()
        except BaseException:
            self._file.close()
            raise

    @property
    def is_empty(self) -> bool:
        """Whether no answer is written yet."""
        return not self._places

    @property
    def is_finished(self) -> bool:
        """Whether the output has been written."""
        return self._is_finished

    def __contains__(self, key: Key) -> bool:
        return key in self._places

    def forget(self) -> None:
        """Starts over. Earlier records stay in the file until this run adds its first one."""
        self._places.clear()
        self._is_forgotten = True

    def stop(self, reason: str) -> None:
        """Ends the run: the next `add` raises ValueError with the reason. May be called from any thread."""
        self._objection = reason

    def add(self, number: int, line_digest: str, record: dict[str, Any]) -> None:
        """Adds the record of a line. After the return, the record survives a kill of this process."""
        if self._objection is not None:
            raise ValueError(self._objection)
        if self._is_forgotten:
            self._file.truncate(0)
            self._end, self._is_forgotten = 0, False
        raw = json.dumps({"line": number, "digest": line_digest, "record": record}, ensure_ascii=False).encode() + b"\n"
        self._file.write(raw)
        self._file.flush()
        self._places[number, line_digest] = (self._end, len(raw))
        self._end += len(raw)

    def write_ordered(self, keys: Iterator[Key], temporary: Path, publish: Callable[[], None]) -> int:
        """Writes the records of `keys`, in that order, to the output, and then removes the journal. Returns the number
        of error records.

        Args:
            temporary: where the ordered records are collected.
            publish: makes the output of this file, whole or not at all, and removes the file.
        """
        num_errors = 0
        with temporary.open("wb") as file:
            for key in keys:
                offset, size = self._places[key]
                record = json.loads(os.pread(self._file.fileno(), size, offset))["record"]
                response = record["response"]
                num_errors += response is None or response["status_code"] != 200
                file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        publish()
        self._is_finished = True
        self._close(remove=True)
        return num_errors

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if not self._file.closed:
            self._close(remove=self._end == 0)

    def _close(self, *, remove: bool) -> None:
        """Closes the file. It is removed while it is locked: a process that has just opened it sees the removal."""
        if remove:
            self._path.unlink()
        self._file.close()

    def _read_back(self) -> None:
        self._file.seek(0)
        for raw in self._file:
            if not raw.endswith(b"\n"):  # an incomplete line: the last run ended during its write
                break
            self._places[_key_of(raw, self._path)] = (self._end, len(raw))
            self._end += len(raw)
        self._file.truncate(self._end)


def partial_path(output: Path) -> Path:
    """The path of the journal of a run that writes `output`."""
    return Path(f"{output}.partial")


def ordered_path(output: Path) -> Path:
    """The path of the file that collects the ordered records before it becomes `output`."""
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
    """Opens or creates the file at `path` and locks it. Raises BlockingIOError if another process holds the lock."""
    while True:
        file = path.open("a+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(file, path):
                return file
        except BaseException:
            file.close()
            raise
        file.close()  # the run that held the file removed it between our open and our lock


def _is_at(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
