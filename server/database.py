"""The server's database: one SQLite file that all HTTP processes open, or memory.

`server.batches.store` and `server.api.routes.responses.store` have the tables.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

NAME = "pallas-serve.db"  # of the file in its folder
BUSY_S = 30.0  # the longest wait for the transaction of another process


class FullError(OSError):
    """There is no room. The message says what to do."""


class Database:
    """A connection that the threads of this process share. Without a `folder` the database is in memory.

    A transaction survives a kill of this process. After a power failure the last ones may be missing.

    Raises:
        ValueError: the file cannot be opened, or is not a database.
    """

    def __init__(self, folder: Path | None) -> None:
        self._path = ":memory:" if folder is None else str(folder / NAME)
        self._lock = threading.RLock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="database")
        options: dict[str, Any] = {"timeout": BUSY_S, "isolation_level": None, "check_same_thread": False}
        try:
            self._connection = sqlite3.connect(self._path, **options)
            self._close = weakref.finalize(self, self._connection.close)
            for setting in ("journal_mode = WAL", "synchronous = NORMAL", "foreign_keys = ON"):
                self._connection.execute(f"PRAGMA {setting}").fetchall()
        except sqlite3.Error as error:
            raise ValueError(
                f"{self._path} cannot be used: {error}. Move it away to start without its batches and responses"
            ) from error

    def create(self, tables: str) -> None:
        """Creates tables and indices that do not exist yet."""
        with self._lock, self._worded():
            self._connection.executescript(tables)

    def execute(self, statement: str, *values: object) -> list[Any]:
        """Executes one statement. Returns its rows. Raises as `transaction` does."""
        with self._lock, self._worded():
            return list(self._connection.execute(statement, values))

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """The statements in the context are one transaction, or part of the one around it. An exception rolls it back.

        Raises:
            FullError: the disk is full.
            OSError: the database cannot be read or written.
        """
        with self._lock, self._worded(), contextlib.ExitStack() as stack:
            if not self._connection.in_transaction:
                stack.enter_context(self._connection)
                self._connection.execute("BEGIN IMMEDIATE")
            yield

    @contextlib.contextmanager
    def _worded(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
                raise FullError("The server's disk is full.") from error
            raise OSError(f"{self._path}: {error}") from error

    async def run[**P, R](self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the function in the thread of the database. Calls run in their order."""
        call = partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def close(self) -> None:
        """Closes the file after the calls that `run` has begun."""
        self._thread.shutdown()
        self._close()
