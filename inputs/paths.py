"""Paths that a command is told. This program reads and writes local files only."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

# One slash is enough: pathlib has made one of the two where a URL went through it.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def check_local(path: str | Path) -> None:
    """ValueError for a URL such as gs://bucket/folder, which would become a local folder named "gs:"."""
    if _URL.match(str(path)):
        raise ValueError(f"{str(path)!r} is a URL, and only local paths are read and written: copy or mount it first")


def local_path(text: str) -> Path:
    """The `type` of every command line argument that is a path."""
    try:
        check_local(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return Path(text)
