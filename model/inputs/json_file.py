"""Reads the JSON and text files of a checkpoint. A fault in a file is a ValueError that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from model.inputs.limits import MAX_JSON_BYTES
from model.inputs.schema import decode


def read_object(path: Path) -> dict[str, Any]:
    """A file's JSON object. As in `transformers`, NaN and Infinity are numbers, and the last of equal keys counts.

    Raises:
        ValueError: the file holds something else, is larger than MAX_JSON_BYTES, or is nested too deeply.
        OSError: it cannot be opened.
    """
    text = read_text(path, MAX_JSON_BYTES)
    try:
        raw = json.loads(text)
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: {error}") from error
    except ValueError as error:  # Python's limit
        raise ValueError(f"{path} holds an integer of thousands of digits") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return raw


def read_fields[S: msgspec.Struct](path: Path, schema: type[S]) -> S:
    """The fields of a file's JSON object that `schema` has. ValueError naming the file and every wrong field."""
    raw = read_object(path)
    try:
        return decode(raw, schema)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def read_text(path: Path, max_bytes: int) -> str:
    """A file's text. ValueError where it is longer than `max_bytes` or not UTF-8."""
    check_size(path, max_bytes)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error


def check_size(path: Path, max_bytes: int) -> None:
    """ValueError where `path` is not a regular file of at most `max_bytes`, OSError where there is none."""
    size = path.stat().st_size
    if not path.is_file():
        raise ValueError(f"{path} is not a file")
    if size > max_bytes:
        raise ValueError(f"{path} has {size} bytes; at most {max_bytes} are read")
