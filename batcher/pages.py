"""The pool of KV pages and the prefix cache over it.

Every page is in one of three states: *free* (it holds nothing that is needed), *used* (at least one sequence refers to
it) or *reusable* (no sequence refers to it, but it holds the K/V of a stored prefix, and a hit revives it). The three
always add up to the total. Page 0 is the null page: no request owns it, and page tables are padded with it.

The prefix cache holds full pages only. A page's key is a digest of (parent digest, the page's tokens), and the root of
the chain is the request's salt. Eviction takes the least recently released page. A sequence's pages are released last
page first, so a prefix stays longer in the cache than the pages after it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np


def next_digest(digests: list[bytes], page_tokens: np.ndarray, salt: int) -> bytes:
    """The digest of the page with `page_tokens` (i32[page_size]) that follows the pages with `digests`."""
    parent = digests[-1] if digests else salt.to_bytes(16, "little", signed=True)
    return blake2b(parent + page_tokens.tobytes(), digest_size=16).digest()


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

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_reusable(self) -> int:
        return len(self._reusable)

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can give: free ones, then reusable ones by eviction."""
        return len(self._free) + len(self._reusable)

    @property
    def num_used(self) -> int:
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
                self._forget(page)
            self._refs[page] = 1
            pages.append(page)
        return pages

    def find(self, digests: Sequence[bytes], tokens: np.ndarray) -> list[int]:
        """The pages of the longest stored prefix. Adds no references. `digests` are those of the pages of `tokens`."""
        pages = []
        content, size = tokens[: len(digests) * self.page_size].tobytes(), self.page_size * tokens.itemsize
        for i, digest in enumerate(digests):
            page = self._index.get(digest)
            if page is None or self._tokens[page] != content[i * size : (i + 1) * size]:
                break
            pages.append(page)
        return pages

    def num_reusable_among(self, pages: Sequence[int]) -> int:
        """The number of `pages` without references. Acquiring `pages` lowers `num_available` by this number."""
        return sum(self._refs[page] == 0 for page in pages)

    def num_held_once(self, pages: Sequence[int]) -> int:
        """The number of `pages` that become available if their holder releases them."""
        return sum(self._refs[page] == 1 for page in pages)

    def acquire(self, pages: Sequence[int]) -> None:
        """Adds a reference to each page that `find` returned."""
        for page in pages:
            if self._refs[page] == 0:
                del self._reusable[page]
            self._refs[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Removes one reference from each page of a sequence, last page first."""
        for page in reversed(pages):
            self._refs[page] -= 1
            assert self._refs[page] >= 0, f"released once too often: {page=}"
            if self._refs[page] == 0:
                if self._digest[page] is None:
                    self._free.append(page)
                else:
                    self._reusable[page] = None

    def commit(self, page: int, digest: bytes, tokens: np.ndarray) -> None:
        """Adds a used, full page to the prefix cache. If the cache holds an equal page already, it keeps that one."""
        assert self._refs[page] > 0, f"only a used page is committed: {page=}"
        assert len(tokens) == self.page_size, f"only a full page is committed: {page=}"
        if digest not in self._index and self._digest[page] is None:
            self._index[digest] = page
            self._digest[page] = digest
            self._tokens[page] = tokens.tobytes()

    def forget(self, digests: Sequence[bytes]) -> None:
        """Removes untrusted pages, by digest, from the prefix cache. Requests that hold them keep them."""
        for digest in digests:
            page = self._index.get(digest)
            if page is not None:
                self._forget(page)
                if self._refs[page] == 0:
                    del self._reusable[page]
                    self._free.append(page)

    def clear_cache(self) -> None:
        """Empties the prefix cache. Reusable pages become free; used pages stay used but cannot be found."""
        self._free.extend(self._reusable)
        self._reusable.clear()
        self._index.clear()
        self._digest = [None] * (self.num_pages + 1)
        self._tokens = [None] * (self.num_pages + 1)

    def _forget(self, page: int) -> None:
        digest = self._digest[page]
        assert digest is not None
        del self._index[digest]
        self._digest[page] = None
        self._tokens[page] = None

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
        if holders is not None:
            counts = np.bincount([p for pages in holders for p in pages], minlength=self.num_pages + 1)
            assert counts.tolist() == self._refs, "references and holders differ"
