"""What the prefix cache holds of a waiting request."""

from __future__ import annotations


class StoredPrefix:
    """The longest stored prefix of a waiting request. The pool keeps it up to date while the request waits, so a long
    one is not searched for again in every step."""

    __slots__ = ("num_reusable", "pages")

    def __init__(self) -> None:
        self.pages: list[int] = []
        self.num_reusable = 0  # pages among these that no sequence refers to
