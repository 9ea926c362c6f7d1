"""Fields that requests about responses, files and batches share: metadata, and the pages of lists."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from server.http.encoding import NestedList
from server.http.request_error import invalid

MAX_METADATA = 16
MAX_METADATA_CHARS = (64, 512)  # of a key, of a value
ORDERS = ("asc", "desc")


def check_metadata(metadata: Mapping[str, str] | None) -> None:
    """Raises RequestError 400 if there are too many entries, or one is too long."""
    if metadata is None:
        return
    key_chars, value_chars = MAX_METADATA_CHARS
    if len(metadata) > MAX_METADATA:
        raise invalid("metadata", f"at most {MAX_METADATA} pairs are kept, got {len(metadata)}")
    if any(len(key) > key_chars or len(value) > value_chars for key, value in metadata.items()):
        raise invalid("metadata", f"keys have at most {key_chars} characters, values at most {value_chars}")


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
