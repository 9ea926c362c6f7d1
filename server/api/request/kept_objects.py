"""Fields that requests about responses, files and batches share: the pages of lists."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

import msgspec

from server.http.encoding import NestedList


class ListQuery(msgspec.Struct, kw_only=True):
    """The query of a list, which is shown in pages."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"  # desc: newest first
    after: str | None = None  # the id of the object before the page


def list_object(ids: Sequence[str], entries: Iterable[Any], *, has_more: bool) -> dict[str, Any]:
    """The list object of one page, for `json_pieces`."""
    ends = {"first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None}
    return {"object": "list", "data": NestedList(entries), **ends, "has_more": has_more}
