"""Moves the bytes of pages between the device, the host's memory and a store, on its own threads.

Moves are done in the order in which they are asked for, because they share the places of the host's memory: a load
reads a place before a later save writes another page there. A second thread reads from the store ahead of time, and a
third thread writes to the store, so a slow disk does not delay other moves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

from batcher.page_store import Offloading, PageStore
from batcher.requests.worker import Worker
from batcher.scheduling.page_moves import HostPage, OffloadingCounts, PageLoad, PageSave
from batcher.step import MAX_PAGE_COPIES, Capacity, PagesRead, Runner, StagedPages

SMALL_LOAD = 2  # a load of up to this many largest copies is cut into small copies
MAX_UNWRITTEN = 64  # pages that wait to be written to the store; more are not written


class Saved(NamedTuple):
    """A save has ended."""

    save: PageSave
    error: Exception | None  # the device's error; None: the pages have been copied


class Loaded(NamedTuple):
    """The next pages of a load are on the device and can be written."""

    load: PageLoad
    staged: StagedPages | None  # None: no more pages can be read
    num_pages: int
    is_last: bool
    error: Exception | None = None  # the device's error; None: the pages have been staged


Moved = Saved | Loaded


class PageMover:
    """Moves the bytes of pages between the device, the host's memory and a store.

    Args:
        num_pages: the number of pages for which the host's memory has room.
        on_moved: is called on one of the mover's threads with the result of a move. The caller answers each call with
            `took`.
        on_failure: is called on one of the mover's threads with an error that ends the engine.
    """

    def __init__(
        self,
        runner: Runner,
        capacity: Capacity,
        num_pages: int,
        offloading: Offloading,
        on_moved: Callable[[Moved], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        self._runner = runner
        self._pages_of_copy, self._page_bytes = capacity.pages_of_copy, capacity.page_bytes
        self._pages_of_small_copy = capacity.pages_of_small_copy
        self._num_pages = num_pages
        self._memory: np.ndarray | None = None  # u8[num_pages, page_bytes], made at the first move
        self._in_place: list[HostPage | None] = [None] * num_pages
        self._store = offloading.store
        self._on_moved = on_moved
        names = ("engine-pages-read", "engine-pages", "engine-pages-write")
        self._workers = self._reads, self._moves, self._writes = [Worker(name, on_failure) for name in names]
        self._writing = threading.Lock()  # held while a page is written or the store is cleared
        self._has_threads = False
        self._may_stage = threading.Semaphore(MAX_PAGE_COPIES)
        self._buffers: SimpleQueue[np.ndarray | None] = SimpleQueue()  # free buffers of the thread that reads
        self._is_closed = False
        self._num_broken = self._num_unwritten = 0

    # --- the engine's thread ---

    def ask(self, moves: Iterable[PageLoad | tuple[PageSave, PagesRead]]) -> None:
        """Queues moves: saves copy pages from the device to their places, and loads stage pages on the device.
        `on_moved` gets the results."""
        for move in moves:
            if not isinstance(move, PageLoad):
                self._moves.do(partial(self._save, *move))
            elif move.from_store:
                self._reads.do(partial(self._read, move))
            else:
                for start, stop in self._copies_of(move):
                    self._moves.do(partial(self._stage, move, start, stop))

    def took(self, moved: Moved) -> None:
        """Tells the mover that a result of `on_moved` has been used, or is not needed."""
        if isinstance(moved, Loaded) and moved.staged is not None:
            self._may_stage.release()

    def count(self, counts: OffloadingCounts) -> None:
        """Sets the counts of the mover and of the store."""
        counts.num_broken, counts.num_unwritten = self._num_broken, self._num_unwritten
        if self._store is not None:
            counts.num_broken += self._store.num_broken
            counts.num_failed = self._store.num_failed
            counts.num_in_store, counts.bytes_in_store = self._store.num_pages, self._store.bytes_on_disk

    def start(self) -> None:
        """Starts the threads. It must be called only once. The threads first write to their buffers: a first write is
        slow, and a request would wait for it later."""
        self._has_threads = True
        self._moves.do(partial(self._staged, list(np.zeros((self._pages_of_copy, self._page_bytes), np.uint8))))
        self._moves.start()
        if self._store is not None:
            for _ in range(2):
                self._reads.do(lambda: self._buffers.put(self._new_buffer()))
            self._reads.start()
            self._writes.start()

    def work_here(self, most: int | None = None) -> bool:
        """Does at most `most` moves on the caller's thread, in a mover without threads. Returns whether there were
        any."""
        num_done = 0
        for worker in self._workers:
            num_done += worker.work_here(None if most is None else most - num_done)
        return num_done > 0

    def clear_store(self) -> None:
        """Clears the store. It waits for a page that is being written. Pages that are no longer trusted are not written
        later."""
        with self._writing:
            if self._store is not None:
                self._store.clear()

    def close(self) -> None:
        """Tells the threads to end after their current moves."""
        self._is_closed = True
        self._may_stage.release()
        self._buffers.put(None)
        for worker in self._workers:
            worker.close()

    def join(self) -> None:
        """Waits until the threads have ended, and closes the store."""
        for worker in self._workers:
            worker.join()
        if self._store is not None:
            self._store.close()

    # --- the work ---

    def _save(self, save: PageSave, read: PagesRead) -> None:
        """Copies the pages of a save to their places, and queues their writes to the store."""
        places = [self._place(host) for host in save.hosts]
        for host in save.hosts:
            self._in_place[host.place] = None
        try:
            read.copy_to(places)
        except Exception as error:
            self._on_moved(Saved(save, error))
            return
        for host, place in zip(save.hosts, places, strict=True):
            host.checksum = xxh3_64_intdigest(place)
            self._in_place[host.place] = host
            if self._store is None:
                continue
            if self._writes.num_waiting() >= MAX_UNWRITTEN:
                self._num_unwritten += 1
            else:
                self._writes.do(partial(self._write, self._store, host, place.copy()))
        self._on_moved(Saved(save, None))

    def _stage(self, load: PageLoad, start: int, stop: int, read: np.ndarray | None = None, num_read: int = 0) -> None:
        """Stages the pages `load.away[start:stop]`, up to the first lost page. A lost page ends the load.

        Args:
            read: u8[pages_of_copy, page_bytes], with the pages that are not in the host's memory.
            num_read: the number of pages before the first that could not be read.
        """
        if load.is_wanted and not load.is_cut:
            self._may_stage.acquire()  # `took` releases it
            if self._is_closed:
                return
            found: list[np.ndarray] = []
            for place, away in enumerate(load.away[start:stop]):
                page = self._on_host(away.host) if away.host is not None else None
                if away.host is None and read is not None and place < num_read:
                    page = read[place]
                if page is None:
                    break
                found.append(page)
            load.is_cut = start + len(found) < stop
            staged, error = self._staged(found)
            if staged is None:
                load.is_cut = True
                self._may_stage.release()
            is_last = load.is_cut or stop == len(load.away)
            self._on_moved(Loaded(load, staged, 0 if staged is None else len(found), is_last, error))
        if read is not None:
            self._give_back(read)

    def _staged(self, pages: list[np.ndarray]) -> tuple[StagedPages | None, Exception | None]:
        """Stages pages on the device. Returns them, or the device's error."""
        try:
            return (self._runner.stage_pages(pages) if pages else None), None
        except Exception as error:
            return None, error

    def _on_host(self, host: HostPage) -> np.ndarray | None:
        """The bytes u8[page_bytes] of a page in the host's memory; None if they are lost or their checksum differs."""
        if self._in_place[host.place] is not host:
            return None
        place = self._place(host)
        if xxh3_64_intdigest(place) == host.checksum:
            return place
        self._num_broken += 1
        self._in_place[host.place] = None
        return None

    def _copies_of(self, load: PageLoad) -> list[tuple[int, int]]:
        """The begin and the end of each copy of a load. With small copies, reading, staging and writing overlap; with
        few large copies, they would not. A step writes only a few copies, so long loads have large ones."""
        count = len(load.away)
        size = self._pages_of_small_copy if count <= SMALL_LOAD * self._pages_of_copy else self._pages_of_copy
        return [(start, min(start + size, count)) for start in range(0, count, size)]

    def _read(self, load: PageLoad) -> None:
        """Reads pages from the store, copy by copy, up to the first lost page."""
        store = self._store
        assert store is not None, "without a store all pages are in the host's memory"
        for start, stop in self._copies_of(load):
            # While one copy is read, the one before it is staged.
            read = self._buffers.get() if self._has_threads else self._new_buffer()
            if read is None:  # the end
                return
            if not load.is_wanted:
                self._give_back(read)
                return
            pages = load.away[start:stop]
            num_read = 0
            for page, to in zip(pages, read, strict=False):
                if page.host is None and not store.load(page.digest, page.tokens, to):
                    break
                num_read += 1
            self._moves.do(partial(self._stage, load, start, stop, read, num_read))
            if num_read < len(pages):
                return

    def _give_back(self, buffer: np.ndarray) -> None:
        if self._has_threads:
            self._buffers.put(buffer)

    def _new_buffer(self) -> np.ndarray:
        return np.full((self._pages_of_copy, self._page_bytes), 0, np.uint8)  # `zeros` would allocate at the first use

    def _write(self, store: PageStore, host: HostPage, page: np.ndarray) -> None:
        with self._writing:
            if host.is_trusted:
                store.store(host.digest, host.tokens, page)

    def _place(self, host: HostPage) -> np.ndarray:
        if self._memory is None:
            self._memory = np.empty((self._num_pages, self._page_bytes), np.uint8)
        place: np.ndarray = self._memory[host.place]
        return place
