"""The files and batches of `--batch-folder`. The database has all but the files' contents, which are in `files/`.

Each file and batch belongs to an API key, its `owner`: the key's digest, which is empty if the server has no keys.
Several processes can use the folder while one of them runs the batches.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from model.inputs.private_folders import PRIVATE
from server.database import Database, FullError
from server.http.encoding import encode_json

Fields = dict[str, Any]  # of an object of the API

TABLES = """
CREATE TABLE IF NOT EXISTS objects (  -- kind: file, batch, or upload for a file that is being received
    id TEXT PRIMARY KEY, owner BLOB NOT NULL, kind TEXT NOT NULL, purpose TEXT, is_over INTEGER NOT NULL DEFAULT 0,
    size INTEGER NOT NULL DEFAULT 0, fields BLOB);
CREATE INDEX IF NOT EXISTS objects_by_owner ON objects (owner, kind, id);
CREATE INDEX IF NOT EXISTS objects_by_size ON objects (size);
CREATE TABLE IF NOT EXISTS records (  -- the answers to a batch that is not over
    batch TEXT REFERENCES objects ON DELETE CASCADE, line INTEGER, is_error INTEGER NOT NULL, record BLOB NOT NULL,
    PRIMARY KEY (batch, line));
"""
MAX_FILES = 10_000  # of a key
MAX_BATCHES = 1_000  # of a key; the oldest that are over make room for new ones
MAX_FILE_BYTES = 200 * 10**6
FILE, BATCH, UPLOAD = "file", "batch", "upload"  # kinds
PREFIXES = {FILE: "file-", BATCH: "batch_"}  # of ids
INPUT, OUTPUT = "batch", "batch_output"  # purposes of files
OVER = ("completed", "failed", "cancelled", "expired")  # statuses of batches
COPY_BYTES = 2**20  # of a file, at once
RECORDS_AT_ONCE = 100
ABANDONED_S = 3600.0  # the age at which an upload counts as abandoned
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class BatchStore:
    """The files and batches in a folder. They take at most `max_bytes`, without the database's own overhead."""

    def __init__(self, database: Database, folder: Path, max_bytes: int) -> None:
        self._database = database
        self._execute = database.execute
        self._folder = folder
        self._files = folder / "files"
        self._files.mkdir(mode=PRIVATE, exist_ok=True)
        self._max_bytes = max_bytes
        database.create(TABLES)

    def find(self, owner: bytes, kind: str, id: str) -> Fields | None:
        """A file or a batch; None: the owner has none with this id."""
        query = "SELECT fields FROM objects WHERE id = ? AND owner = ? AND kind = ?"
        return next((msgspec.json.decode(fields) for (fields,) in self._execute(query, id, owner, kind)), None)

    def page(
        self, owner: bytes, kind: str, limit: int, *, ascending: bool, after: str | None, purpose: str | None
    ) -> list[Fields]:
        """Files or batches in the order of their creation or in the reverse order. The first one follows `after`."""
        beyond, order = (">", "ASC") if ascending else ("<", "DESC")
        query = f"""SELECT fields FROM objects WHERE owner = ?1 AND kind = ?2 AND (?3 IS NULL OR purpose = ?3)
                    AND (?4 IS NULL OR id {beyond} ?4) ORDER BY id {order} LIMIT ?5"""
        return [msgspec.json.decode(fields) for (fields,) in self._execute(query, owner, kind, purpose, after, limit)]

    def content(self, id: str) -> Path:
        """The path of a file's content."""
        return self._files / id

    def reserve(self, owner: bytes, num_bytes: int) -> str:
        """Reserves room for a file that is being received. Returns the id of the file. Raises FullError."""
        id = new_id(FILE)
        with self._database.transaction():
            if self._count(owner, FILE) >= MAX_FILES:
                raise FullError(f"There are {MAX_FILES} files already. Please delete some.")
            self._check_room(num_bytes)
            self._execute(
                "INSERT INTO objects (id, owner, kind, size) VALUES (?, ?, ?, ?)", id, owner, UPLOAD, num_bytes
            )
        return id

    def keep(self, id: str, content: BinaryIO, filename: str) -> Fields:
        """Makes a file of the content. `reserve` has returned the id. Raises FullError."""
        self._write(id, iter(lambda: content.read(COPY_BYTES), b""))
        fields = self._file(id, filename, INPUT)
        update = "UPDATE objects SET kind = ?, purpose = ?, size = ?, fields = ? WHERE id = ?"
        self._execute(update, FILE, INPUT, fields["bytes"], encode_json(fields), id)
        return fields

    def release(self, id: str) -> None:
        """Gives the room back if `keep` has made no file."""
        if self._execute("DELETE FROM objects WHERE id = ? AND kind = ? RETURNING id", id, UPLOAD):
            self.content(id).unlink(missing_ok=True)

    def delete_file(self, id: str) -> None:
        """Deletes a file. A process that reads it can continue."""
        self._execute("DELETE FROM objects WHERE id = ?", id)
        self.content(id).unlink(missing_ok=True)

    def new_batch(self, owner: bytes, fields: Fields) -> None:
        """Adds a new batch. If there are too many, the oldest one that is over is removed. Raises FullError."""
        with self._database.transaction():
            self._check_room(0)
            if self._count(owner, BATCH) >= MAX_BATCHES:
                oldest = "SELECT min(id) FROM objects WHERE owner = ? AND kind = ? AND is_over"
                if not self._execute(f"DELETE FROM objects WHERE id = ({oldest}) RETURNING id", owner, BATCH):
                    raise FullError(f"There are {MAX_BATCHES} batches already that are not over.")
            insert = "INSERT INTO objects (id, owner, kind, fields) VALUES (?, ?, ?, ?)"
            self._execute(insert, fields["id"], owner, BATCH, encode_json(fields))

    def running(self) -> list[tuple[bytes, str]]:
        """The owners and ids of the batches that are not over, the oldest first."""
        return self._execute("SELECT owner, id FROM objects WHERE kind = ? AND NOT is_over ORDER BY id", BATCH)

    def cancel(self, owner: bytes, id: str) -> None:
        """Gives a batch that is not over the status `cancelling`. The process that runs it then ends it."""
        with self._database.transaction():
            fields = self.find(owner, BATCH, id)
            if fields is not None and fields["status"] not in OVER:
                self._save(fields | {"status": "cancelling", "cancelling_at": int(time.time())})

    def is_cancelled(self, owner: bytes, id: str) -> bool:
        """Whether `cancel` was called for the batch."""
        return bool((self.find(owner, BATCH, id) or {}).get("cancelling_at"))

    def save(self, owner: bytes, fields: Fields) -> None:
        """Saves a batch. After `cancel` it has the status `cancelling` until it is over."""
        with self._database.transaction():
            cancelled_s = (self.find(owner, BATCH, fields["id"]) or fields)["cancelling_at"]
            if cancelled_s is not None:
                status = fields["status"] if fields["status"] in OVER else "cancelling"
                fields = fields | {"status": status, "cancelling_at": cancelled_s}
            self._save(fields)

    def answered(self, batch: str) -> dict[int, bool]:
        """The numbers of the lines that have records, and whether these are errors."""
        return dict(self._execute("SELECT line, is_error FROM records WHERE batch = ?", batch))

    def add_records(self, batch: str, records: Mapping[int, bytes], *, is_error: bool, may_fill: bool = False) -> None:
        """Adds the records of lines. They count twice, because they become a file when the batch is over.

        Raises FullError if there is no room, unless it `may_fill` the folder.
        """
        num_bytes = 2 * sum(map(len, records.values()))
        with self._database.transaction():
            if not may_fill:
                self._check_room(num_bytes)
            for line, record in records.items():
                self._execute("INSERT OR IGNORE INTO records VALUES (?, ?, ?, ?)", batch, line, is_error, record)
            self._execute("UPDATE objects SET size = size + ? WHERE id = ?", num_bytes, batch)

    def end(self, owner: bytes, fields: Fields) -> None:
        """Ends a batch: its records become the files of its answers and of its errors."""
        batch = fields["id"]
        files = []
        for kind, is_error in (("output", False), ("error", True)):
            if is_error in self.answered(batch).values():
                id = fields[f"{kind}_file_id"] = new_id(FILE)
                self._write(id, self._records(batch, is_error=is_error))
                files.append(self._file(id, f"{batch}_{kind}.jsonl", OUTPUT))
        with self._database.transaction():
            insert = "INSERT INTO objects (id, owner, kind, purpose, size, fields) VALUES (?, ?, ?, ?, ?, ?)"
            for file in files:
                self._execute(insert, file["id"], owner, FILE, OUTPUT, file["bytes"], encode_json(file))
            self._execute("DELETE FROM records WHERE batch = ?", batch)
            self._execute("UPDATE objects SET size = 0 WHERE id = ?", batch)
            self.save(owner, fields)

    def lock(self) -> BinaryIO | None:
        """Takes the lock of the process that runs the batches, which lasts while the file is open. None: another
        process has it."""
        file = (self._folder / "lock").open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        return file

    def sweep(self) -> None:
        """Removes the incomplete files of processes that were killed."""
        oldest = _id_at(FILE, time.time() - ABANDONED_S)
        self._execute("DELETE FROM objects WHERE kind = ? AND id < ?", UPLOAD, oldest)
        known = {id for (id,) in self._execute("SELECT id FROM objects")}
        for path in self._files.iterdir():
            if path.name < oldest and path.name not in known:
                path.unlink(missing_ok=True)

    def _count(self, owner: bytes, kind: str) -> int:
        rows = self._execute("SELECT count(*) FROM objects WHERE owner = ? AND kind = ?", owner, kind)
        return int(rows[0][0])

    def _check_room(self, num_bytes: int) -> None:
        ((total,),) = self._execute("SELECT total(size) FROM objects")
        if total + num_bytes > self._max_bytes:
            raise FullError("The folder of files and batches is full (--batch-folder-size). Please delete some files.")

    def _save(self, batch: Fields) -> None:
        update = "UPDATE objects SET is_over = ?, fields = ? WHERE id = ?"
        self._execute(update, batch["status"] in OVER, encode_json(batch), batch["id"])

    def _records(self, batch: str, *, is_error: bool) -> Iterator[bytes]:
        """The records of a batch as lines, in their order."""
        query = "SELECT line, record FROM records WHERE batch = ? AND is_error = ? AND line > ? ORDER BY line LIMIT ?"
        last = 0
        while rows := self._execute(query, batch, is_error, last, RECORDS_AT_ONCE):
            yield from (record + b"\n" for _, record in rows)
            last = rows[-1][0]

    def _write(self, id: str, content: Iterable[bytes]) -> None:
        try:
            with self.content(id).open("wb") as file:
                file.writelines(content)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            raise FullError("The server's disk is full.") from error

    def _file(self, id: str, filename: str, purpose: str) -> Fields:
        return {
            "id": id,
            "object": "file",
            "bytes": self.content(id).stat().st_size,
            "created_at": int(time.time()),
            "expires_at": None,
            "filename": filename,
            "purpose": purpose,
            "status": "processed",
            "status_details": None,
        }


def new_id(kind: str) -> str:
    """An id that sorts after all earlier ones."""
    return _id_at(kind, time.time()) + secrets.token_hex(9)


def _id_at(kind: str, seconds: float) -> str:
    """The beginning of the ids of this time."""
    return f"{PREFIXES[kind]}{round(seconds * 1e6):014x}"
