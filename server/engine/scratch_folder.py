"""A folder for as long as a process runs, which the next start removes where the process could not.

The process holds a lock on its folder, and the kernel releases the lock however the process ends. A folder that can be
locked is therefore one whose process has gone. (systemd-tmpfiles, which removes what is old, heeds the same lock.)
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Self

PREFIX = "pallas-serve-run-"
NAME_LENGTH = len(PREFIX) + 8  # `tempfile` adds eight characters
LINKLESS = os.O_DIRECTORY | os.O_NOFOLLOW


class ScratchFolder:
    """A new folder in `root` (default: the system's folder for such things) that only its owner may enter.

    Removes those that ended processes of the same user have left there. Raises OSError where there is no room for one.
    """

    def __init__(self, root: Path | None = None) -> None:
        root = root or Path(tempfile.gettempdir())
        sweep(root)
        self._lock = -1
        while self._lock < 0:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
            self._lock = _lock_new(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.cleanup()

    def cleanup(self) -> None:
        with contextlib.suppress(FileNotFoundError):  # removed by somebody who cleans up
            shutil.rmtree(self.path)
        os.close(self._lock)


def sweep(root: Path) -> None:
    """Removes the folders of ended processes in `root`: those of this user that no process has locked.

    Follows no link in `root`. What cannot be removed stays: a running process's, or what another start removes now.
    """
    with _opened(root, os.O_DIRECTORY) as root_fd:
        for name in os.listdir(root_fd):
            if not name.startswith(PREFIX):
                continue
            with contextlib.suppress(OSError), _opened(name, LINKLESS, dir_fd=root_fd) as folder:
                if _is_own(folder):
                    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(name, dir_fd=root_fd)


@contextlib.contextmanager
def _opened(path: Path | str, flags: int, **options: int) -> Iterator[int]:
    descriptor = os.open(path, flags, **options)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _is_own(folder: int) -> bool:
    status = os.fstat(folder)
    return status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077


def _lock_new(folder: Path) -> int:
    """The descriptor that holds the lock; -1 where another start took the folder for a dead process's meanwhile."""
    descriptor = -1
    try:
        descriptor = os.open(folder, LINKLESS)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), folder.stat()):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    if descriptor >= 0:
        os.close(descriptor)
    return -1
