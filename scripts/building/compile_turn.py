"""Lets the first of several engines on one host compile the programs, which the others then read from the disk.

The first engine's process holds a lock on a file while it compiles. The kernel releases the lock when the process ends
for any reason, so no process waits for one that has ended.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_POLL_S = 0.05  # between two checks whether the first engine has the lock


class CompileTurn:
    """The order in which the engines of one start compile.

    Args:
        file: the lock file, which all engines of the start share and no earlier start has created.
        is_first: whether this process compiles first.
    """

    def __init__(self, file: Path, *, is_first: bool) -> None:
        self._file = file
        self.is_first = is_first

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """A context in which the first engine compiles. The others wait until its end."""
        own = self._file.with_suffix(".new")
        with own.open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            own.rename(self._file)  # with its lock: the others never see the file without it
            yield

    def wait(self) -> None:
        """Waits until the first engine has compiled or has ended. The server ends all engines if one cannot start."""
        while not self._file.exists():
            time.sleep(_POLL_S)
        with self._file.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
