"""A temporary folder for one process. If the process cannot remove its folder, a later start removes it.

The process holds a lock on its folder, which the kernel releases when the process ends for any reason. So a folder that
can be locked belongs to a process that has ended. systemd-tmpfiles, which removes old files, respects this lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import zmq

logger = logging.getLogger("pallas_serve")

PREFIX = "pallas-serve-run-"
NAME_LENGTH = len(PREFIX) + 8  # `tempfile` adds eight characters
LINKLESS = os.O_DIRECTORY | os.O_NOFOLLOW
LONGEST_NAME = 9  # characters of a socket's name in its folder
SHORT_FOLDERS = ("/tmp", "/var/tmp")  # if the system's temporary folder has too long a path for a socket


class ScratchFolder:
    """A new folder in `root` that only its owner may enter. By default `root` is the system's temporary folder.

    Also removes the folders in `root` whose processes of the same user have ended. Raises OSError if no folder can be
    made.
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
        with contextlib.suppress(FileNotFoundError):  # already removed from outside
            shutil.rmtree(self.path)
        os.close(self._lock)


def sweep(root: Path) -> None:
    """Removes the folders in `root` whose processes have ended: this user's folders that no process has locked.

    Links in `root` are not followed. Folders that cannot be removed are skipped, such as locked ones and those that
    another start is removing.
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
    """Locks a new folder. Returns the descriptor that holds the lock, or -1 if another start has locked or removed the
    folder before."""
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


def folder_for_sockets() -> ScratchFolder:
    """A folder for sockets in the system's temporary folder, or in SHORT_FOLDERS if a socket's path would be too long.

    Raises OSError if no folder can be used.
    """
    preferred = Path(tempfile.gettempdir())
    try:
        length = len(str(preferred).encode())
    except UnicodeEncodeError:  # zmq's addresses are text
        length = zmq.IPC_PATH_MAX_LEN
    if length + 1 + NAME_LENGTH + 1 + LONGEST_NAME <= zmq.IPC_PATH_MAX_LEN:
        return ScratchFolder(preferred)
    for root in map(Path, SHORT_FOLDERS):
        if os.access(root, os.W_OK | os.X_OK):
            logger.warning("TMPDIR is too long for the path of a socket: the engine's sockets are in %s", root)
            return ScratchFolder(root)
    raise OSError(
        f"TMPDIR is too long for the engine's sockets, whose paths have at most {zmq.IPC_PATH_MAX_LEN} bytes, and "
        f"neither of {', '.join(SHORT_FOLDERS)} can be written to: set TMPDIR to a shorter folder"
    )
