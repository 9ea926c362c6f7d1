"""Paths from the command line and files. This program reads and writes local files only."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

# One slash is enough: pathlib turns the two slashes of a URL into one.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def check_local(path: str | Path, name: str) -> None:
    """Raises ValueError, with the flag or field `name`, for a URL such as gs://bucket/folder. As a path it would be a
    local folder called "gs:"."""
    if _URL.match(str(path)):
        raise ValueError(f"{name} {_refusal(path)}")


def expanded(path: str | Path, name: str) -> Path:
    """The path with its ~ replaced. A ValueError names the flag or field `name` if ~user is unknown."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{name} {str(path)!r}: {error}") from error


def local_path(text: str) -> Path:
    """The `type` of every command line argument that is a path."""
    if _URL.match(text):
        raise argparse.ArgumentTypeError(_refusal(text))  # argparse names the flag
    return Path(text)


def _refusal(path: str | Path) -> str:
    return f"{str(path)!r} is a URL, and only local paths are read and written: copy it here or mount it"
