"""The folder of files and batches. Each API key has its own subfolder.

    KEY/files/file-...         a file, and next to it file-....json, its description
    KEY/batches/batch_....json a batch, and batch_....journal while it runs, batch_....cancel if it is to end

KEY is the digest of an API key. All files are written under another name and then renamed. So several processes can
read the folder while one of them runs the batches. Ids sort in the order of their creation.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from model.inputs.paths import write_whole
from model.inputs.private_folders import PRIVATE, check_closed
from server.http.encoding import encode_json
from server.logs import ThrottledLog

Fields = dict[str, Any]  # of an object of the API

MAX_FILES = 10_000  # of a key
MAX_BATCHES = 1_000  # of a key; the oldest that are over make room for new ones
MAX_FILE_BYTES = 200 * 10**6
FILE, BATCH = "file-", "batch_"  # ids begin with it
INPUT, OUTPUT = "batch", "batch_output"  # purposes of files
JSON, JOURNAL, CANCEL = ".json", ".journal", ".cancel"
OVER = ("completed", "failed", "cancelled", "expired")  # statuses of batches
COPY_BYTES = 2**20  # of a file, at once
COUNT_INTERVAL_S = 1.0  # between two counts of the sizes of all files
ABANDONED_S = 3600.0  # the age at which a file that was not renamed counts as incomplete
_NO_KEY = "no-key"
_FIELDS = {FILE: ("id", "filename", "purpose"), BATCH: ("id", "status", "input_file_id")}  # some that are read
_log = ThrottledLog(logging.getLogger("pallas_serve"))
_ID = re.compile(r"(?:file-|batch_)[0-9a-f]{32}")


class FullError(Exception):
    """The folder has no room. The message says what to do."""


class BatchFolder:
    """The folder of `--batch-folder`, which is created if it does not exist.

    Raises:
        ValueError: other users may enter it, or it belongs to another user.
        OSError: it cannot be created.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._counted, self._counted_s = 0, -COUNT_INTERVAL_S  # bytes at this time, and those of this process since
        self._reserved = 0  # bytes that this process is receiving; they are counted, too
        self._lock = threading.Lock()
        path.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        check_closed(path, "--batch-folder")

    def of_key(self, key: bytes) -> KeyFolder:
        """The subfolder of the key with this digest, which is empty if the server has no keys."""
        return KeyFolder(self, self._path / (key.hex() or _NO_KEY))

    def check_room(self, num_bytes: int = 0) -> None:
        """Raises FullError if there is no room for so many bytes more."""
        with self._lock:
            self._check_room(num_bytes)

    def reserve(self, num_bytes: int) -> None:
        """Reserves room for a file that is being received. Raises FullError."""
        with self._lock:
            self._check_room(num_bytes)
            self._reserved += num_bytes

    def release(self, num_bytes: int, num_kept: int) -> None:
        """Ends `reserve`: so many bytes of them are in the folder now."""
        with self._lock:
            self._reserved -= num_bytes
            self._counted -= num_bytes - num_kept

    def _check_room(self, num_bytes: int) -> None:
        if time.monotonic() < self._counted_s + COUNT_INTERVAL_S:
            self._counted += num_bytes
            if self._counted <= self._max_bytes:
                return
        self._counted, self._counted_s = self._num_bytes() + self._reserved + num_bytes, time.monotonic()
        if self._counted > self._max_bytes:
            raise FullError("The folder of files and batches is full (--batch-folder-size). Please delete some files.")

    def lock(self) -> BinaryIO | None:
        """Takes the lock of the process that runs the batches, which lasts while the file is open. None: another
        process has it."""
        file = (self._path / "lock").open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        return file

    def _num_bytes(self) -> int:
        """The bytes of all files. A journal counts twice, because its records become files when the batch is over."""
        total = 0
        for entry in self._entries():
            with contextlib.suppress(FileNotFoundError):
                total += entry.stat().st_size * (2 if entry.name.endswith(JOURNAL) else 1)
        return total

    def sweep(self) -> None:
        """Removes the incomplete files of processes that were killed."""
        for entry in self._entries():
            with contextlib.suppress(FileNotFoundError):
                name, _, suffix = entry.name.partition(".")
                is_known = _ID.fullmatch(name) and suffix in ("", *(end[1:] for end in (JSON, JOURNAL, CANCEL)))
                if not is_known and time.time() - entry.stat().st_mtime > ABANDONED_S:
                    os.unlink(entry.path)

    def _entries(self) -> Iterator[os.DirEntry[str]]:
        for folder in self._path.glob("*/*/"):
            with os.scandir(folder) as entries:
                yield from entries


class KeyFolder:
    """The files and batches of one API key."""

    def __init__(self, whole: BatchFolder, path: Path) -> None:
        self._whole = whole
        self._files = path / "files"
        self._batches = path / "batches"

    def file_ids(self) -> list[str]:
        """The ids of all files, in the order of their creation."""
        return _ids(self._files)

    def batch_ids(self) -> list[str]:
        """The ids of all batches, in the order of their creation."""
        return _ids(self._batches)

    def file(self, id: str) -> Fields | None:
        """The description of a file. Raises ValueError if it is damaged."""
        return _read(self._files, id, FILE)

    def content(self, id: str) -> Path:
        """The path of a file."""
        return self._files / id

    def reserve(self, num_bytes: int) -> None:
        """Reserves room for a file until `release`. Raises FullError."""
        if len(self.file_ids()) >= MAX_FILES:
            raise FullError(f"There are {MAX_FILES} files already. Please delete some.")
        self._whole.reserve(num_bytes)

    def release(self, num_bytes: int, num_kept: int) -> None:
        """Ends `reserve`: so many bytes of them are in the folder now."""
        self._whole.release(num_bytes, num_kept)

    def keep(self, content: BinaryIO, filename: str, purpose: str) -> Fields:
        """Makes a file of the content."""
        self._files.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        path = self._files / f"upload-{secrets.token_hex(10)}"
        try:
            with path.open("wb") as file:
                shutil.copyfileobj(content, file, COPY_BYTES)
                file.flush()
                os.fsync(file.fileno())
            return self.put_file(path, filename, purpose, new_id(FILE))
        finally:
            path.unlink(missing_ok=True)

    def put_file(self, written: Path, filename: str, purpose: str, id: str) -> Fields:
        """Makes a file of `written`, which is in the folder of files under another name."""
        fields = {
            "id": id,
            "object": "file",
            "bytes": written.stat().st_size,
            "created_at": int(time.time()),
            "expires_at": None,
            "filename": filename,
            "purpose": purpose,
            "status": "processed",
            "status_details": None,
        }
        written.replace(self._files / id)
        write_whole(self._files / f"{id}{JSON}", encode_json(fields))
        return fields

    def delete_file(self, id: str) -> None:
        """Deletes a file. A process that reads it can continue."""
        for name in (f"{id}{JSON}", id):
            (self._files / name).unlink(missing_ok=True)

    def temporary(self) -> Path:
        """A new path for a file that is being written."""
        self._files.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        return self._files / f"output-{secrets.token_hex(10)}"

    def check_room(self, num_bytes: int) -> None:
        """Raises FullError if the folder has no room for so many more bytes."""
        self._whole.check_room(num_bytes)

    def batch(self, id: str) -> Fields | None:
        """Reads a batch; None: there is none. After `cancel` it has the status `cancelling` until it is over. Raises
        ValueError if it is damaged."""
        fields = _read(self._batches, id, BATCH)
        if fields is not None and fields["status"] not in OVER:
            with contextlib.suppress(FileNotFoundError):
                asked_s = (self._batches / f"{id}{CANCEL}").stat().st_mtime
                fields |= {"status": "cancelling", "cancelling_at": int(asked_s)}
        return fields

    def put_batch(self, fields: Fields) -> None:
        """Writes a batch."""
        write_whole(self._batches / f"{fields['id']}{JSON}", encode_json(fields))

    def new_batch(self, fields: Fields) -> None:
        """Writes a new batch. If there are too many, the oldest one that is over is removed. Raises FullError."""
        self._whole.check_room()
        self._batches.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        ids = self.batch_ids()
        if len(ids) >= MAX_BATCHES:
            oldest = next((id for id in ids if (whole(self.batch, id) or {}).get("status") in OVER), None)
            if oldest is None:
                raise FullError(f"There are {MAX_BATCHES} batches already that are not over.")
            (self._batches / f"{oldest}{JSON}").unlink(missing_ok=True)
        self.put_batch(fields)

    def journal(self, id: str) -> Path:
        """The path of a batch's journal, which exists while the batch runs."""
        return self._batches / f"{id}{JOURNAL}"

    def cancel(self, id: str) -> None:
        """Marks a batch as cancelled. Its process then ends it."""
        (self._batches / f"{id}{CANCEL}").touch()

    def is_cancelled(self, id: str) -> bool:
        """Whether `cancel` was called for the batch."""
        return (self._batches / f"{id}{CANCEL}").exists()

    def clear(self, id: str) -> None:
        """Removes the files of a batch that it needs only until it is over."""
        for end in (JOURNAL, CANCEL):
            (self._batches / f"{id}{end}").unlink(missing_ok=True)


def new_id(prefix: str) -> str:
    """An id that sorts after all earlier ones."""
    return f"{prefix}{time.time_ns() // 1000:014x}{secrets.token_hex(9)}"


def whole(read: Callable[[str], Fields | None], id: str) -> Fields | None:
    """The result of `read`; None if the object is damaged, which is logged."""
    try:
        return read(id)
    except ValueError as error:
        _log.warning("--batch-folder: %s%s is damaged, and is passed over: %s", id, JSON, error)
        return None


def _ids(folder: Path) -> list[str]:
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted(name.removesuffix(JSON) for name in names if name.endswith(JSON))


def _read(folder: Path, id: str, prefix: str) -> Fields | None:
    """Reads an object; None: there is none. The id comes from a client. Raises ValueError if the object is damaged."""
    if not _ID.fullmatch(id) or not id.startswith(prefix):
        return None
    try:
        fields = msgspec.json.decode((folder / f"{id}{JSON}").read_bytes(), type=Fields)
    except FileNotFoundError:
        return None
    if missing := [name for name in _FIELDS[prefix] if name not in fields]:
        raise ValueError(f"it has no {missing[0]}")
    return fields
