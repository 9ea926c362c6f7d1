"""The four forms of a prompt that need no chat template: a text, ids, and lists of either."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from server.http.errors import RequestError, invalid

Given = str | Sequence[str | int | list[int]] | None


def listed(param: str, given: Given) -> list[str | list[int]]:
    """As a list of texts and lists of ids; `check_kinds` looks at the rest. Raises RequestError 400."""
    if given is None:
        raise RequestError(400, f"{param}: is missing", param=param)
    if isinstance(given, str):
        return [given]
    if not given:
        raise invalid(param, "must not be an empty list")
    return cast("list[str | list[int]]", [given] if isinstance(given[0], int) else given)


def check_kinds(param: str, given: Given) -> None:
    """Raises RequestError 400 where a list holds items of several kinds."""
    if isinstance(given, list) and len(set(map(type, given))) > 1:
        raise invalid(param, "must be a text, a list of texts, a list of token ids or a list of such lists")
