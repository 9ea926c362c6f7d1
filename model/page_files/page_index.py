"""The pages that are known to be in a folder, in the order of their last use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from typing import NamedTuple


class KeptPage(NamedTuple):
    """A page's file, as a folder lists it."""

    name: str  # IDENTITY/XX/DIGEST.page, with the first two digits of the digest in between
    num_bytes: int
    used_s: float  # seconds since 1970


class PageIndex:
    """The files of pages by their names. `in` may be asked at any time, and all else by one thread at once."""

    def __init__(self) -> None:
        self.num_bytes = 0  # bytes of all files
        self._pages: OrderedDict[str, KeptPage] = OrderedDict()  # the most recently used last

    def __contains__(self, name: str) -> bool:
        return name in self._pages

    def __len__(self) -> int:
        return len(self._pages)

    def add(self, page: KeptPage) -> None:
        """Adds a page that is used now, or replaces it."""
        before = self._pages.get(page.name)
        self.num_bytes += page.num_bytes - (0 if before is None else before.num_bytes)
        self._pages[page.name] = page
        self._pages.move_to_end(page.name)

    def use(self, name: str, now_s: float) -> None:
        """Makes a page the most recently used one. One that is not known is ignored."""
        if name in self._pages:
            self.add(self._pages[name]._replace(used_s=now_s))

    def forget(self, name: str) -> None:
        """Takes a page out. One that is not known is ignored."""
        page = self._pages.pop(name, None)
        self.num_bytes -= 0 if page is None else page.num_bytes

    def shrink(self, most: int) -> list[str]:
        """Takes out the least recently used pages until the others have at most so many bytes; returns their names."""
        out = []
        while self._pages and self.num_bytes > most:
            name = next(iter(self._pages))
            self.forget(name)
            out.append(name)
        return out

    def replace(self, listed: Iterable[KeptPage], newer: Collection[str]) -> None:
        """Takes over what a folder lists.

        Args:
            newer: pages that were added since the listing began, which may lack them.
        """
        before, pages = self._pages, {page.name: page for page in listed}
        pages |= {name: before[name] for name in newer if name in before}
        used_s = {
            name: max(page.used_s, before[name].used_s if name in before else 0.0) for name, page in pages.items()
        }
        in_order = sorted(pages, key=used_s.__getitem__)
        self._pages = OrderedDict((name, pages[name]._replace(used_s=used_s[name])) for name in in_order)
        self.num_bytes = sum(page.num_bytes for page in pages.values())
