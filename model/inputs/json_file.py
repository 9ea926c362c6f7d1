"""Reads the JSON and text files of a checkpoint. A fault in a file is a ValueError that names the file."""

from __future__ import annotations

import argparse
import json
from typing import Any

import msgspec

from model.inputs.limits import MAX_JSON_BYTES
from model.inputs.paths import Place
from model.inputs.schema import decode


def read_object(path: Place) -> dict[str, Any]:
    """A file's JSON object. As in `transformers`, NaN and Infinity are numbers, and the last of equal keys is used.

    Raises:
        ValueError: the file holds no JSON object, is larger than MAX_JSON_BYTES, or is nested too deeply.
        OSError: the file cannot be opened.
    """
    raw = _parsed(read_text(path, MAX_JSON_BYTES), str(path))
    if not isinstance(raw, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return raw


def read_fields[S: msgspec.Struct](path: Place, schema: type[S]) -> S:
    """The fields of `schema` in a file's JSON object. A ValueError names the file and every wrong field."""
    raw = read_object(path)
    try:
        return decode(raw, schema)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def json_argument(text: str) -> Any:
    """The `type` of every command line argument that is JSON."""
    try:
        return _parsed(text, "the JSON")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error  # argparse names the flag


def _parsed(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(f"{name} is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{name}: {error}") from error
    except ValueError as error:  # Python's limit
        raise ValueError(f"{name} holds an integer of thousands of digits") from error


def read_text(path: Place, max_bytes: int) -> str:
    """A file's text. Raises ValueError if the file is longer than `max_bytes` or not UTF-8."""
    check_size(path, max_bytes)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error


def check_is_file(path: Place) -> None:
    """Raises ValueError if `path` is a folder, pipe, socket or device: reading one may wait without end. Raises OSError
    if nothing is there."""
    path.stat()
    if not path.is_file():
        raise ValueError(f"{path} is not a file")


def check_size(path: Place, max_bytes: int) -> None:
    """Raises ValueError if `path` is not a regular file of at most `max_bytes`, OSError if it does not exist."""
    check_is_file(path)
    if (size := path.stat().st_size) > max_bytes:
        raise ValueError(f"{path} has {size} bytes; at most {max_bytes} are read")
