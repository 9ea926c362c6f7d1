"""The journal of a batch run: its finished records. The next run over the same input continues from them."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Self

import msgspec

from server.http.encoding import encode_json


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The run that a journal belongs to."""

    input: str  # a digest of the lines
    settings: dict[str, Any]  # the settings that change answers, by flag
    replaces: str | None  # the version of the output that the run may replace; None: it may replace none


class Journal:
    """The finished records of a run, in the order in which they finished, in `OUTPUT.partial` next to the output.

    The first line is the header. A record is finished when its whole line is in the file. The next run can therefore
    continue after a kill at any moment. Only one process at a time can hold the journal. A journal without records
    leaves no file.

    Raises:
        BlockingIOError: another process holds the journal; nothing was changed.
        ValueError: the file is not a journal.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = _open_locked(path)
        self._header: Header | None = None
        self._places: dict[int, tuple[int, int]] = {}  # a line's number -> offset, size of its record
        self._errors: set[int] = set()  # the lines whose records are errors
        self._end = 0
        self._is_new = True  # the header is not in the file, where records of another run may still be
        try:
            self._read_back()
        except BaseException:
            self._file.close()
            raise

    @property
    def header(self) -> Header:
        """The run to which the records belong. It is set after `begin`, or if there are records."""
        assert self._header is not None
        return self._header

    @property
    def is_empty(self) -> bool:
        """Whether no answer is written yet."""
        return not self._places

    def __contains__(self, number: int) -> bool:
        return number in self._places

    def begin(self, header: Header) -> None:
        """Begins a new run. Earlier records stay in the file until this run adds its first one."""
        self._header = header
        self._places.clear()
        self._errors.clear()
        self._is_new = True

    def check_belongs_to(self, run: Header) -> None:
        """Raises ValueError if the records belong to another input or to other settings. The message says what to
        do."""
        own, asked = self.header, run.settings
        if own.input != run.input:
            difference = "another input"
        elif own.settings != asked:
            flags = [flag for flag in (own.settings | asked) if own.settings.get(flag) != asked.get(flag)]
            pairs = [f"{flag} {own.settings.get(flag)!r}, not {asked.get(flag)!r}" for flag in flags]
            difference = f"this input with other settings ({'; '.join(pairs)})"
        else:
            return
        raise ValueError(
            f"{self._path} holds {len(self._places)} finished records of an interrupted run over {difference}. Finish "
            "that run with its own command, or name another --output; --overwrite drops the records"
        )

    def add(self, number: int, record: bytes) -> None:
        """Adds the record of a line, as JSON. After the return, the record survives a kill of this process."""
        first = b""
        if self._is_new:
            self._file.truncate(0)
            first = encode_json(self.header) + b"\n"
            self._end, self._is_new = len(first), False
        raw = _entry(number, record)
        self._file.write(first + raw)
        self._file.flush()
        self._note(number, _decode_entry(raw).record, self._end, raw)
        self._end += len(raw)

    def write_to(self, path: Path, numbers: Iterable[int]) -> int:
        """Writes the records of the lines `numbers`, in that order, to `path`. Returns the number of error records."""
        num_errors = 0
        with path.open("wb") as file:
            for number in numbers:
                num_errors += number in self._errors
                file.write(self._record(number) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        return num_errors

    def finish(self) -> None:
        """Removes the journal, whose records are now in the output."""
        self._close(remove=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if not self._file.closed:
            self._close(remove=self._end == 0)

    def _close(self, *, remove: bool) -> None:
        """Closes the file. It is removed while it is locked, so a process that has just opened it sees the removal."""
        if remove:
            self._path.unlink()
        self._file.close()

    def _record(self, number: int) -> bytes:
        offset, size = self._places[number]
        return os.pread(self._file.fileno(), size, offset)

    def _note(self, number: int, record: _Record, offset: int, raw: bytes) -> None:
        """Notes the position of a record. `raw` is its line, which begins at `offset`."""
        head, tail = len(_entry(number, b"")) - len(_TAIL), len(_TAIL)
        self._places[number] = (offset + head, len(raw) - head - tail)
        self._errors.discard(number)
        if record.response is None or record.response.status_code != 200:
            self._errors.add(number)

    def _read_back(self) -> None:
        self._file.seek(0)
        end = 0
        for raw in self._file:
            if not raw.endswith(b"\n"):  # an incomplete line: the last run ended during its write
                if self._header is None and not raw.startswith(_START[: len(raw)]):
                    raise self._is_something_else()
                break
            try:
                if self._header is None:
                    self._header = _decode_header(raw)
                else:
                    entry = _decode_entry(raw)
                    self._note(entry.line, entry.record, end, raw)
            except (ValueError, RecursionError) as error:
                raise self._is_something_else() from error
            end += len(raw)
        self._end, self._is_new = (end, False) if self._places else (0, True)
        self._file.truncate(self._end)

    def _is_something_else(self) -> ValueError:
        return ValueError(f"{self._path} is in the way: it holds something else than the records of an interrupted run")


_START = b'{"input":"'  # of a header
_TAIL = b"}\n"  # of an entry


class _Response(msgspec.Struct):
    status_code: int


class _Record(msgspec.Struct):
    response: _Response | None = None


class _Entry(msgspec.Struct):
    """The fields of a record's line that are read here."""

    line: int
    record: _Record


_decode_header, _decode_entry = msgspec.json.Decoder(Header).decode, msgspec.json.Decoder(_Entry).decode


def _entry(number: int, record: bytes) -> bytes:
    return b'{"line": %d, "record": %b%b' % (number, record, _TAIL)


def _open_locked(path: Path) -> BinaryIO:
    """Opens or creates the file at `path` and locks it. Raises BlockingIOError if another process holds the lock."""
    while True:
        file = path.open("a+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    return file
        except BaseException:
            file.close()
            raise
        file.close()  # the run that held the file removed it between our open and our lock
