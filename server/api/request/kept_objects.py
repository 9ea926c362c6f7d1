"""Fields that requests about responses, files and batches share: the pages of lists."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from server.http.encoding import NestedList
from server.http.request_error import invalid

ORDERS = ("asc", "desc")


def page_size(query: Mapping[str, str], *, most: int, default: int) -> int:
    """The parameter `limit`: the number of objects on a page of a list. Raises RequestError 400."""
    text = query.get("limit", str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 9 and 1 <= int(text) <= most):
        raise invalid("limit", f"must be between 1 and {most}, got {text[:40]!r}")
    return int(text)


def is_ascending(query: Mapping[str, str]) -> bool:
    """Whether the parameter `order` is `asc`; `desc` is newest first. Raises RequestError 400 for other values."""
    order = query.get("order", "desc")
    if order not in ORDERS:
        raise invalid("order", f"must be one of {', '.join(ORDERS)}, got {order[:40]!r}")
    return order == "asc"


def list_object(ids: Sequence[str], entries: Iterable[Any], *, has_more: bool) -> dict[str, Any]:
    """The list object of one page, for `json_pieces`."""
    ends = {"first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None}
    return {"object": "list", "data": NestedList(entries), **ends, "has_more": has_more}
