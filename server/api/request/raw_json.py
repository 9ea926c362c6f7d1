"""Reads request fields of arbitrary JSON separately from the body. Sizes are bounded, and errors name the field."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from server.http.errors import INVALID_BODY, RequestError, invalid

RawField = msgspec.Raw | msgspec.UnsetType


def read_raw[T](param: str, raw: RawField, decoder: msgspec.json.Decoder[T | None], *, max_bytes: int) -> T | None:
    """None if the field was not given. Raises RequestError 400."""
    if raw is msgspec.UNSET:
        return None
    if len(raw) > max_bytes:
        raise invalid(param, f"is larger than {max_bytes} bytes")
    try:
        return decoder.decode(raw)
    except RecursionError as error:
        raise invalid(param, "is nested too deeply") from error
    except ValueError as error:
        raise RequestError(400, f"{param}: {error}", type=INVALID_BODY, param=param) from error


def is_deeper_than(most: int, value: Any) -> bool:
    """Whether lists and objects are nested more than `most` deep."""
    level = [value]
    for _ in range(most + 1):
        level = [inner for item in level for inner in _items(item)]
    return bool(level)


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list) else ()
