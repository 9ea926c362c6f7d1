"""Several engines of one host have the same programs: the first compiles them, and the others read them.

The first engine's process holds a lock on a file while it compiles. The kernel releases the lock when the process ends
for any reason, so no process waits for one that is gone.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_POLL_S = 0.05  # until the first engine has the lock


class CompileTurn:
    """Whose turn it is to compile.

    Args:
        file: of all engines of one start; no earlier start has made it.
        is_first: whether this process compiles.
    """

    def __init__(self, file: Path, *, is_first: bool) -> None:
        self._file = file
        self.is_first = is_first

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """The first engine: the others wait until the end of the context."""
        own = self._file.with_suffix(".new")
        with own.open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            own.rename(self._file)  # with its lock: the others never see the file without it
            yield

    def wait(self) -> None:
        """The other engines: until the first has compiled, or has ended. The server ends all if one cannot start."""
        while not self._file.exists():
            time.sleep(_POLL_S)
        with self._file.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
