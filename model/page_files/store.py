"""A store of pages in files in a folder. Their bytes have a bound; the least recently used are deleted.

Several engines may share the folder. Each knows the pages that it has stored, and learns of other engines' pages when
it lists the folder, at first and then from time to time. So between two listings, engines together may exceed the bound
by what they have stored since. Nothing is stored until the first listing has ended.

The folder may also have pages of other weights, or of another form. They count for the bound, and are never read.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path

import numpy as np

from model.inputs.words import one_line
from model.page_files.local_pages import LocalPages
from model.page_files.page_file import DIGEST_BYTES, Content, PageHead, PageIdentity
from model.page_files.page_index import KeptPage, PageIndex

logger = logging.getLogger(__name__)

PATH_FLAG, SIZE_FLAG = "--kv-offloading-path", "--kv-offloading-disk"
PAUSE_S = 60.0  # nothing is stored for this time after a failure: a full disk stays full for a while
_LISTED_EVERY_S = 30.0
_LISTING_SHARE = 0.02  # most of the time spent on listings: one of many files keeps the interpreter from the engine
_CLOSE_S = 5.0  # the longest wait for a listing that waits for a disk


class PageFiles:
    """A `batcher.page_store.PageStore` of files. A failure is counted; the first of its kind is a warning.

    Args:
        folder: is made if it is absent.
        identity: the identity of the pages that are stored and found.
        max_bytes: the most bytes of the files of all pages in the folder.
        list_every_s: the seconds between two listings.
        clock: gives seconds, for the pause after a failure.

    Raises:
        ValueError: the folder cannot be used or is open to others, or `max_bytes` is less than a page.
    """

    def __init__(
        self,
        folder: Path,
        identity: PageIdentity,
        *,
        max_bytes: int,
        list_every_s: float = _LISTED_EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_stored = 0  # pages
        self.num_loaded = 0
        self.num_broken = 0  # files whose content does not match their names
        self.num_failed = 0  # failed calls of a disk or a store, and pages that were not stored in a pause
        self._identity = identity.digest()
        self._page_bytes = identity.page_bytes
        self._token_bytes = identity.page_size * np.dtype(np.int32).itemsize
        self._file_bytes = self._head(bytes(DIGEST_BYTES), bytes(self._token_bytes)).size + self._page_bytes
        if max_bytes < self._file_bytes:
            raise ValueError(f"{SIZE_FLAG}: {max_bytes} bytes are less than a page, which takes {self._file_bytes}")
        self._files = LocalPages(folder, PATH_FLAG)
        self._list_every_s = list_every_s
        self._max_bytes = max_bytes
        self._clock = clock
        self._paused_until_s = -float("inf")
        self._warned: set[tuple[str, str]] = set()
        self._lock = threading.Lock()  # guards all that follows and the counters; never held while files are used
        self._index = PageIndex()
        self._num_writing = 0
        self._since_listing: set[str] | None = None  # stored since the last listing began; None: there was none
        self._is_listed = False
        self._listing = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def num_pages(self) -> int:
        """The number of all pages in the folder, as far as they are known."""
        return len(self._index)

    @property
    def bytes_on_disk(self) -> int:
        return self._index.num_bytes

    def has(self, digest: bytes) -> bool:
        """Whether the page was there when the folder was listed, or has been stored since."""
        self.start_listing()
        return _name(self._identity, digest) in self._index

    def load(self, digest: bytes, tokens: bytes, page: np.ndarray) -> bool:
        """Reads a page into `page`, u8[page_bytes]. Returns False if it is missing, broken, or a page of other tokens;
        `page` may then hold anything. A page that another engine has just stored is found, too."""
        self.start_listing()
        head = self._head(digest, tokens)
        name, start, content = _name(head.identity, digest), bytearray(head.size), self._bytes_of(page)
        try:
            is_whole = self._files.read(name, start, content)
        except FileNotFoundError:
            self._forget(name)
            return False
        except (OSError, ValueError) as error:
            self._forget(name)  # it is not asked for again before the next listing
            self._fail("read", error)
            return False
        found = head.content(start, content) if is_whole else Content.BROKEN
        if found is Content.BROKEN:
            with self._lock:
                self.num_broken += 1
            self._forget(name)
            self._delete([name])
        elif found is Content.PAGE:
            self._files.touch(name)
            with self._lock:
                self.num_loaded += 1
                self._index.use(name, time.time())
        return found is Content.PAGE

    def store(self, digest: bytes, tokens: bytes, page: np.ndarray) -> bool:
        self.start_listing()
        head, content = self._head(digest, tokens), self._bytes_of(page)
        name = _name(head.identity, digest)
        if name in self._index and self._files.touch(name):
            with self._lock:
                self._index.use(name, time.time())
            return True
        with self._lock:
            may_write = self._is_listed and self._clock() >= self._paused_until_s
            most = self._max_bytes - self._file_bytes * (1 + self._num_writing)
            if not may_write or most < 0:
                self.num_failed += 1
                return False
            self._num_writing += 1
            unused = self._index.shrink(most)
        is_written = self._delete(unused) and self._write(name, [head.packed(content), content])
        with self._lock:
            self._num_writing -= 1
            if is_written:
                self.num_stored += 1
                self._index.add(KeptPage(name, self._file_bytes, time.time()))
                if self._since_listing is not None:
                    self._since_listing.add(name)
        return is_written

    def clear(self) -> None:
        """Forgets all pages: later calls do not find them. The files stay for engines that start later, until they are
        the least recently used. Only this engine finds the pages that it stores from now on."""
        self._identity = secrets.token_bytes(DIGEST_BYTES)

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def refresh(self) -> None:
        """Lists the folder, and deletes the least recently used files if the files exceed the bound. A thread calls it
        in the background, after the first use of the store."""
        with self._listing:
            with self._lock:
                self._since_listing = set()
            try:
                found = list(takewhile(lambda _: not self._closed.is_set(), self._files.listed()))
            except (OSError, ValueError) as error:
                self._fail("listed", error)
                return
            if self._closed.is_set():
                return
            with self._lock:
                self._index.replace(found, self._since_listing)
                unused = self._index.shrink(self._max_bytes - self._file_bytes * self._num_writing)
                self._is_listed = True
        self._delete(unused)

    def start_listing(self) -> None:
        """Starts the thread that lists the folder now and from time to time. The first use of a page starts it, too."""
        if self._thread is not None:
            return
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._keep_listing, name="page files", daemon=True)
                self._thread.start()

    def _keep_listing(self) -> None:
        pause_s = self._list_every_s if self._is_listed else 0.0
        while not self._closed.wait(pause_s):
            began_s = time.monotonic()
            self.refresh()
            pause_s = max(self._list_every_s, (time.monotonic() - began_s) / _LISTING_SHARE)

    def _head(self, digest: bytes, tokens: bytes) -> PageHead:
        if len(tokens) != self._token_bytes:
            raise ValueError(f"the tokens of a page have {self._token_bytes} bytes, and these {len(tokens)}")
        return PageHead(self._identity, digest, tokens, self._page_bytes)

    def _bytes_of(self, page: np.ndarray) -> memoryview:
        if page.dtype != np.uint8 or page.shape != (self._page_bytes,):
            raise ValueError(f"a page is u8[{self._page_bytes}], and this is {page.dtype}{list(page.shape)}")
        return memoryview(page)

    def _forget(self, name: str) -> None:
        with self._lock:
            self._index.forget(name)

    def _write(self, name: str, parts: Sequence[bytes | memoryview]) -> bool:
        try:
            self._files.write(name, parts)
        except (OSError, ValueError) as error:
            self._paused_until_s = self._clock() + PAUSE_S
            self._fail("written", error)
            return False
        return True

    def _delete(self, names: Sequence[str]) -> bool:
        """Deletes files. Returns whether all could be deleted. The next listing finds the others."""
        try:
            for name in names:
                self._files.delete(name)
        except (OSError, ValueError) as error:
            self._paused_until_s = self._clock() + PAUSE_S
            self._fail("deleted", error)
            return False
        return True

    def _fail(self, what: str, error: OSError | ValueError) -> None:
        kind = (what, repr(error.errno) if isinstance(error, OSError) else type(error).__name__)
        with self._lock:
            self.num_failed += 1
            is_new = kind not in self._warned
            self._warned.add(kind)
        if is_new:
            logger.warning("%s: pages cannot be %s: %s", PATH_FLAG, what, one_line(str(error)))


def _name(identity: bytes, digest: bytes) -> str:
    page = digest.hex()
    return f"{identity.hex()}/{page[:2]}/{page}.page"
