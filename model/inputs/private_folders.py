"""Folders of this machine whose content other users may not see: they belong to this user and are closed to others."""

from __future__ import annotations

import os
import stat
from pathlib import Path

PRIVATE = 0o700  # of a folder


def make_folder(folder: Path, mode: int = PRIVATE) -> None:
    """Makes the folder and those above it, all with the same mode. Raises OSError if it cannot be made."""
    for path in (*reversed(folder.parents), folder):
        path.mkdir(exist_ok=True, mode=mode)


def check_closed(folder: Path, flag: str) -> None:
    """Raises ValueError if another user owns the folder, or may enter or list it. `flag` names the folder."""
    status = folder.stat()
    if status.st_uid != os.geteuid():
        raise ValueError(f"{flag} {folder}: it belongs to another user. Name a folder of your own")
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise ValueError(f"{flag} {folder}: other users may enter it. Close it with `chmod 700 {folder}`")
