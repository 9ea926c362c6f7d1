"""The pool of KV pages and the prefix cache over it.

Every page is in one of three states: *free* (it holds nothing that is needed), *used* (at least one sequence refers to
it) or *reusable* (no sequence refers to it, but it holds the K/V of a stored prefix, and a hit revives it). The three
always add up to the total. Page 0 is the null page: no request owns it, and page tables are padded with it.

The prefix cache holds full pages only. A page's key is a digest of (parent digest, the page's tokens), and the root of
the chain is the request's salt, with the identity of its LoRA adapter. Eviction takes the least recently released page.
A sequence's pages are released last page first, so a prefix stays longer in the cache than the pages after it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from batcher.page_events import PageObserver


@dataclass(eq=False, slots=True)
class StoredPrefix:
    """The longest stored prefix of a waiting request. The pool keeps it up to date while the request waits, so a long
    one is not searched for again in every step."""

    pages: list[int] = field(default_factory=list)
    num_reusable: int = 0  # pages among these that no sequence refers to


class PagePool:
    """The pages' states and reference counts. Ids run from 1 to `num_pages`."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"a pool has pages and a page has tokens: {num_pages=} {page_size=}")
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages, 0, -1))  # a stack; page 1 is handed out first
        self._reusable: OrderedDict[int, None] = OrderedDict()  # least recently released first
        self._refs = [0] * (num_pages + 1)
        self._digest: list[bytes | None] = [None] * (num_pages + 1)  # of pages in the index
        self._tokens: list[bytes | None] = [None] * (num_pages + 1)
        self._index: dict[bytes, int] = {}
        self._prefixes: dict[int, list[StoredPrefix]] = {}  # of waiting requests, by each of their pages
        self.observers: list[PageObserver] = []

    @property
    def num_free(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    @property
    def num_reusable(self) -> int:
        """Pages that no request holds and whose prefix can still be found."""
        return len(self._reusable)

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can give: free ones, then reusable ones by eviction."""
        return len(self._free) + len(self._reusable)

    @property
    def num_used(self) -> int:
        """Pages that requests hold."""
        return self.num_pages - self.num_available

    def allocate(self, count: int) -> list[int]:
        """`count` pages with one reference each. The caller has checked `num_available`."""
        assert count <= self.num_available, f"{count=} {self.num_available=}"
        pages = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._reusable.popitem(last=False)
                digest, tokens = self._forget(page)
                for observer in self.observers:
                    observer.evicted(page, digest, tokens)
            self._refs[page] = 1
            pages.append(page)
        return pages

    def extend(
        self, prefix: StoredPrefix, digests: Sequence[bytes], count: int, content: Callable[[int], bytes]
    ) -> None:
        """Adds to `prefix` the pages that follow it in the cache, up to `count` pages in all. Adds no references. From
        then on the pool keeps the prefix up to date, until `let_go`.

        Args:
            digests: the digests of the request's pages.
            content: page number -> the bytes of its tokens.
        """
        for place in range(len(prefix.pages), count):
            page = self._index.get(digests[place])
            if page is None or self._tokens[page] != content(place):
                break
            prefix.pages.append(page)
            prefix.num_reusable += self._refs[page] == 0
            self._prefixes.setdefault(page, []).append(prefix)

    def let_go(self, prefix: StoredPrefix) -> list[int]:
        """Empties the prefix, and returns the pages that it had."""
        pages = prefix.pages.copy()
        self._cut(prefix, 0)
        return pages

    def _cut(self, prefix: StoredPrefix, length: int) -> None:
        while len(prefix.pages) > length:
            page = prefix.pages.pop()
            prefix.num_reusable -= self._refs[page] == 0
            holders = self._prefixes[page]
            holders.remove(prefix)
            if not holders:
                del self._prefixes[page]

    def num_held_once(self, pages: Sequence[int]) -> int:
        """The number of `pages` that become available if their holder releases them."""
        return sum(self._refs[page] == 1 for page in pages)

    def acquire(self, pages: Sequence[int]) -> None:
        """Adds a reference to each page of a stored prefix."""
        for page in pages:
            if self._refs[page] == 0:
                del self._reusable[page]
                for observer in self.observers:
                    observer.acquired(page)
                for prefix in self._prefixes.get(page, ()):
                    prefix.num_reusable -= 1
            self._refs[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Removes one reference from each page of a sequence, last page first."""
        for page in reversed(pages):
            self._refs[page] -= 1
            assert self._refs[page] >= 0, f"released once too often: {page=}"
            if self._refs[page] == 0:
                digest, tokens = self._digest[page], self._tokens[page]
                if digest is None or tokens is None:
                    self._free.append(page)
                else:
                    self._reusable[page] = None
                    for observer in self.observers:
                        observer.released(page, digest, tokens)
                    for prefix in self._prefixes.get(page, ()):
                        prefix.num_reusable += 1

    def commit(self, page: int, digest: bytes, content: bytes) -> bool:
        """Adds a used, full page to the prefix cache, with the bytes of its tokens (i32[page_size]). False: the cache
        holds an equal page already, and keeps that one."""
        assert self._refs[page] > 0, f"only a used page is committed: {page=}"
        assert len(content) == 4 * self.page_size, f"only a full page is committed: {page=}"
        if digest in self._index or self._digest[page] is not None:
            return False
        self._index[digest] = page
        self._digest[page] = digest
        self._tokens[page] = content
        for observer in self.observers:
            observer.stored(page, digest, content)
        return True

    def forget(self, digests: Sequence[bytes]) -> None:
        """Removes untrusted pages, by digest, from the prefix cache. Requests that hold them keep them."""
        for digest in digests:
            page = self._index.get(digest)
            for observer in self.observers:
                observer.forgotten(page, digest)
            if page is not None:
                self._forget(page)
                if self._refs[page] == 0:
                    del self._reusable[page]
                    self._free.append(page)

    def clear_cache(self) -> None:
        """Empties the prefix cache. Reusable pages become free; used pages stay used but cannot be found."""
        for page in list(self._prefixes):
            self._cut_at(page)
        self._free.extend(self._reusable)
        self._reusable.clear()
        self._index.clear()
        self._digest = [None] * (self.num_pages + 1)
        self._tokens = [None] * (self.num_pages + 1)
        for observer in self.observers:
            observer.cleared()

    def _forget(self, page: int) -> tuple[bytes, bytes]:
        """Takes a page out of the prefix cache. Returns its digest and its tokens."""
        self._cut_at(page)
        digest, tokens = self._digest[page], self._tokens[page]
        assert digest is not None and tokens is not None
        del self._index[digest]
        self._digest[page] = None
        self._tokens[page] = None
        return digest, tokens

    def _cut_at(self, page: int) -> None:
        """The page is no longer stored: prefixes end before it."""
        for prefix in list(self._prefixes.get(page, ())):
            place = len(prefix.pages) - 1  # from the end: eviction begins with the last page of a prefix
            while prefix.pages[place] != page:
                place -= 1
            self._cut(prefix, place)

    def check_integrity(self, holders: Sequence[Sequence[int]] | None = None) -> None:
        """Raises AssertionError if the pages' states are inconsistent. `holders`: all page lists with references."""
        free, reusable = set(self._free), set(self._reusable)
        used = {page for page in range(1, self.num_pages + 1) if self._refs[page] > 0}
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & reusable and not free & used and not reusable & used, "a page is in two states"
        assert free | reusable | used == set(range(1, self.num_pages + 1)), "a page is lost, or the null page is owned"
        assert self._refs[0] == 0 and min(self._refs) >= 0, "the null page is owned, or a count is negative"
        assert len(used) == self.num_used
        for digest, page in self._index.items():
            assert self._digest[page] == digest and self._tokens[page] is not None and page not in free
        assert sum(d is not None for d in self._digest) == len(self._index)
        assert all(self._digest[page] is not None for page in reusable), "a reusable page cannot be found"
        for page, prefixes in self._prefixes.items():
            assert self._digest[page] is not None, "a prefix has a page that is not stored"
            for prefix in prefixes:
                assert page in prefix.pages and prefix.num_reusable == sum(p in reusable for p in prefix.pages)
        if holders is not None:
            counts = np.bincount([p for pages in holders for p in pages], minlength=self.num_pages + 1)
            assert counts.tolist() == self._refs, "references and holders differ"
