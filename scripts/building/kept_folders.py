"""The folders of files that are kept between starts. They only make starts faster: a start works without them.

A folder of programs holds code that the next start runs. So a folder that other users could write to is not used, and
is an error if a flag names it.
"""

from __future__ import annotations

import logging
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from model.inputs.paths import Place, check_local, place
from model.inputs.private_folders import check_private, make_folder
from model.inputs.remote import RemotePath
from scripts.flags.settings import EngineSettings

logger = logging.getLogger("pallas_serve")


@dataclass(frozen=True, kw_only=True)
class KeptFolders:
    """The folders in which files are kept between starts; None: they are not kept."""

    programs: Place | None = None
    native: Path | None = None  # for C code, which is loaded from this machine only
    weights: Path | None = None  # for prepared weights


def kept_folders(settings: EngineSettings) -> KeptFolders:
    """Creates the folders of a start. The log names a folder that cannot be used.

    Raises ValueError if a flag names a folder that other users could write to.
    """
    programs = compile_cache_folder(settings.compile_cache)
    if isinstance(programs, Path) and not _is_private(programs, asked=settings.compile_cache is not None):
        programs = None
    native = None
    if programs is not None:
        native = (users_cache_folder() / "compiled" if isinstance(programs, RemotePath) else programs) / "native"
        native = native if _is_private(native, asked=False) else None
    weights = programs / "weights" if isinstance(programs, Path) else None
    return KeptFolders(programs=programs, native=native, weights=weights)


def compile_cache_folder(asked: str | None) -> Place | None:
    """The folder of compiled programs; None: they are not kept."""
    if asked == "none":
        return None
    return users_cache_folder() / "compiled" if asked is None else place(asked, "--compile-cache")


def users_cache_folder() -> Path:
    """This program's folder in the user's cache folder, or in the temporary one for a user without a home."""
    base = os.environ.get("XDG_CACHE_HOME")
    if not base:
        try:
            base = str(Path.home() / ".cache")
        except RuntimeError:  # the container's user has a number and no name
            base = f"{tempfile.gettempdir()}/cache-of-{os.geteuid()}"
    check_local(base, "XDG_CACHE_HOME")
    return Path(base) / "pallas-serve"


def _is_private(folder: Path, *, asked: bool) -> bool:
    """Creates the folder. Returns whether it exists and other users cannot write to it.

    Raises ValueError if a flag names the folder (`asked`) and other users can write to it.
    """
    try:
        make_folder(folder)
        check_private(folder, "--compile-cache")
    except (OSError, ValueError) as error:
        if asked and isinstance(error, ValueError):
            raise
        logger.warning("programs are not kept for the next start: %s", error)
        return False
    return True
