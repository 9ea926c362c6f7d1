"""Places of folders and files: paths of this machine, and URLs of object stores such as gs://bucket/folder.

Everything that reads or writes what a flag or a field names goes through this module. A `RemotePath` has those methods
of `pathlib.Path` that the program uses, so most code is the same for both. Any store serves that fsspec has a package
for; Google Cloud Storage needs gcsfs.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from model.inputs.private_folders import writing_whole
from model.inputs.remote import GCS, RemotePath, filesystem

type Place = Path | RemotePath

# One slash is enough: pathlib turns the two slashes of a URL into one.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(/?)(.*)", re.DOTALL)
_OF_THIS_MACHINE = ("file", "local")
_WEB = ("http", "https")


def is_url(text: str | Path | RemotePath) -> bool:
    """Whether this is a URL. "preset:llama-3.1-8b" and "c:/models" are none."""
    return _URL.match(str(text)) is not None


def place(text: str | Path | RemotePath, name: str) -> Place:
    """The place that `text` names. A ~ of a path is replaced.

    Args:
        name: the flag or field, for errors.

    Raises:
        ValueError: ~user is unknown, or a URL is malformed, is of this machine, or needs a package that is not there.
    """
    if isinstance(text, RemotePath):
        return text
    found = _URL.match(str(text))
    if found is None:
        return expanded(text, name)
    scheme, second_slash, rest = found.groups()
    scheme = GCS if scheme.lower() == "gcs" else scheme.lower()
    try:
        if scheme in _OF_THIS_MACHINE:
            raise ValueError("a file of this machine is named by its path alone")
        if scheme in _WEB:
            raise ValueError("folders cannot be listed over HTTP; a model of the Hugging Face hub is named org/model")
        parts = rest.rstrip("/").split("/")
        if not second_slash or "::" in rest or not all(parts) or {".", ".."} & set(parts):
            raise ValueError("a URL is written as gs://bucket/folder")
        if scheme == GCS and "#" in rest:
            raise ValueError("the name of an object has no # here, which would be its generation")
        filesystem(scheme)
    except ValueError as error:
        raise ValueError(f"{name} {str(text)!r}: {error}") from error
    return RemotePath(scheme, "/".join(parts))


def place_argument(text: str) -> Place:
    """The `type` of every command line argument that is a path or a URL."""
    try:
        return place(text, "")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).strip()) from error  # argparse names the flag


def check_local(path: str | Path, name: str) -> None:
    """Raises ValueError, with the flag or field `name`, for a URL. As a path it would be a local folder called
    "gs:"."""
    if is_url(path):
        raise ValueError(f"{name} {_refusal(path)}")


def local_path(text: str) -> Path:
    """The `type` of every command line argument that is a path of this machine."""
    if is_url(text):
        raise argparse.ArgumentTypeError(_refusal(text))  # argparse names the flag
    return Path(text)


def expanded(path: str | Path, name: str) -> Path:
    """The path with its ~ replaced. A ValueError names the flag or field `name` if ~user is unknown."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{name} {str(path)!r}: {error}") from error


def write_whole(path: Place, content: bytes, mode: int = 0o666) -> None:
    """Writes a file whole or not at all: a reader sees the old content or the new one. `mode` is that of `os.open`."""
    if isinstance(path, RemotePath):
        path.write_bytes(content)  # an object is there once its upload is complete
        return
    with writing_whole(path, mode) as file:
        file.write(content)


def _refusal(path: str | Path) -> str:
    return f"{str(path)!r} is a URL, and this is read and written on this machine only: copy it here or mount it"
