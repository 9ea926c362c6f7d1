"""Moves the bytes of pages between the device, the host's memory and a store, on threads of its own.

The moves are done in the order in which they are asked for, because they share the places of the host's memory: a load
reads a place before a later save writes another page there. What a load reads from the store comes before its turn, on
a second thread, and a third one writes to the store: a slow disk keeps no other move waiting.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import Full, Queue, SimpleQueue
from typing import NamedTuple
from zlib import crc32

import numpy as np

from batcher.page_store import PageStore
from batcher.scheduling.page_moves import AwayPage, HostPage, PageLoad, PageSave
from batcher.step import Capacity, PagesRead, Runner, StagedPages

MAX_UNWRITTEN = 64  # pages that wait to be written to the store; more are not written


class Saved(NamedTuple):
    """A save has ended."""

    save: PageSave
    error: Exception | None  # of the device; the pages have not been copied then


class Loaded(NamedTuple):
    """Some pages of a load, in its order, are on the device and can be written."""

    load: PageLoad
    staged: StagedPages | None  # None: no more can be read
    num_pages: int
    is_last: bool
    error: Exception | None = None  # of the device; the pages have not been staged then


class _Save(NamedTuple):
    save: PageSave
    read: PagesRead


class _Load(NamedTuple):
    load: PageLoad
    from_store: dict[int, np.ndarray | None]  # index in `load.away` -> u8[page_bytes]; None: the store has lost it


Moved = Saved | Loaded


class PageMover:
    """See the module's docstring. The threads start at the first move.

    Args:
        num_pages: places of the host's memory.
        on_moved, on_failure: are called on a thread of this. A failure is an error that ends the engine.

    Attributes:
        num_broken: pages whose bytes had changed in the host's memory.
        num_unwritten: pages that the store would have been too slow for.
    """

    def __init__(
        self,
        runner: Runner,
        capacity: Capacity,
        num_pages: int,
        store: PageStore | None,
        on_moved: Callable[[Moved], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        self._runner = runner
        self._pages_of_copy, self._page_bytes = capacity.pages_of_copy, capacity.page_bytes
        self._num_pages = num_pages
        self._memory: np.ndarray | None = None  # u8[num_pages, page_bytes], made at the first move
        self._in_place: list[HostPage | None] = [None] * num_pages
        self._store = store
        self._on_moved, self._on_failure = on_moved, on_failure
        self._moves: SimpleQueue[_Save | _Load | None] = SimpleQueue()
        self._to_read: SimpleQueue[PageLoad | None] = SimpleQueue()
        self._to_write: Queue[tuple[HostPage, np.ndarray] | None] = Queue(MAX_UNWRITTEN)
        self._writing = threading.Lock()  # a page is written, or the store is cleared
        self._threads: list[threading.Thread] = []
        self._is_closed = False
        self.num_broken = self.num_unwritten = 0

    # --- the engine's thread ---

    def ask(self, moves: Iterable[PageLoad | tuple[PageSave, PagesRead]]) -> None:
        """What is read from the device is to come to its places, and the pages of loads are to be staged. `on_moved`
        gets the results."""
        for move in moves:
            if not isinstance(move, PageLoad):
                self._moves.put(_Save(*move))
            elif move.from_store:
                self._to_read.put(move)
            else:
                self._moves.put(_Load(move, {}))

    def start(self) -> None:
        """Starts the threads, once."""
        if self._threads:
            return
        work = {"engine-pages": self._move_all}
        if self._store is not None:
            work |= {"engine-pages-read": self._read_all, "engine-pages-write": self._write_all}
        self._threads = [
            threading.Thread(target=self._watched, args=(run,), name=name, daemon=True) for name, run in work.items()
        ]
        for thread in self._threads:
            thread.start()

    def work_here(self) -> None:
        """Without threads: does all moves on the caller's thread."""
        while not self._to_read.empty():
            load = self._to_read.get()
            assert load is not None
            self._read(load)
        while not self._moves.empty():
            move = self._moves.get()
            assert move is not None
            self._move(move)
        while not self._to_write.empty():
            written = self._to_write.get()
            assert written is not None
            self._write(*written)

    def clear_store(self) -> None:
        """The store forgets all pages, and gets none that is not trusted any more. Waits for a page that is being
        written."""
        if self._store is not None:
            with self._writing:
                self._store.clear()

    def close(self) -> None:
        """The threads are to end after the moves that they are at."""
        self._is_closed = True
        self._moves.put(None)
        self._to_read.put(None)
        with suppress(Full):  # the writer looks at `_is_closed` after each page
            self._to_write.put_nowait(None)

    def join(self) -> None:
        """Waits until the threads have ended, and closes the store."""
        for thread in self._threads:
            thread.join()
        if self._store is not None:
            self._store.close()

    # --- the threads ---

    def _watched(self, run: Callable[[], None]) -> None:
        try:
            run()
        except Exception as error:
            self._on_failure(error)

    def _move_all(self) -> None:
        while (move := self._moves.get()) is not None and not self._is_closed:
            self._move(move)

    def _read_all(self) -> None:
        while (load := self._to_read.get()) is not None and not self._is_closed:
            self._read(load)

    def _write_all(self) -> None:
        while (written := self._to_write.get()) is not None and not self._is_closed:
            self._write(*written)

    # --- the moves ---

    def _move(self, move: _Save | _Load) -> None:
        if isinstance(move, _Save):
            self._on_moved(Saved(move.save, self._saved(move)))
        else:
            self._stage(move)

    def _saved(self, move: _Save) -> Exception | None:
        """Copies the pages to their places. Returns the device's error."""
        places = [self._place(host) for host in move.save.hosts]
        for host in move.save.hosts:
            self._in_place[host.place] = None
        try:
            move.read.copy_to(places)
        except Exception as error:
            return error
        for host, place in zip(move.save.hosts, places, strict=True):
            host.checksum = crc32(place)
            self._in_place[host.place] = host
            if self._store is not None:
                self._ask_to_write(host, place)
        return None

    def _ask_to_write(self, host: HostPage, place: np.ndarray) -> None:
        if self._to_write.full():
            self.num_unwritten += 1
        else:
            self._to_write.put_nowait((host, place.copy()))

    def _stage(self, move: _Load) -> None:
        """Stages the pages, copy by copy, up to the first one that is lost."""
        load, num_staged = move.load, 0
        while num_staged < len(load.away) and load.is_wanted:
            stop = min(num_staged + self._pages_of_copy, len(load.away))
            found: list[np.ndarray] = []
            for index in range(num_staged, stop):
                page = self._found(load.away[index], move.from_store.get(index))
                if page is None:
                    break
                found.append(page)
            is_last = num_staged + len(found) < stop or stop == len(load.away)
            try:
                staged = self._runner.stage_pages(found) if found else None
            except Exception as error:
                self._on_moved(Loaded(load, None, 0, True, error))
                return
            self._on_moved(Loaded(load, staged, len(found), is_last))
            if is_last:
                return
            num_staged = stop

    def _found(self, page: AwayPage, from_store: np.ndarray | None) -> np.ndarray | None:
        """The bytes of a page, u8[page_bytes]; None: they are lost."""
        host = page.host
        if host is None:
            return from_store
        if self._in_place[host.place] is not host:
            return None
        place = self._place(host)
        if crc32(place) == host.checksum:
            return place
        self.num_broken += 1
        self._in_place[host.place] = None
        return None

    def _read(self, load: PageLoad) -> None:
        """Reads the pages of the store, up to the first one that is lost."""
        assert self._store is not None
        read: dict[int, np.ndarray | None] = {}
        for index, page in enumerate(load.away):
            if page.host is not None:
                continue
            if not load.is_wanted:
                return
            into = np.empty(self._page_bytes, np.uint8)
            read[index] = into if self._store.load(page.digest, page.tokens, into) else None
            if read[index] is None:
                break
        self._moves.put(_Load(load, read))

    def _write(self, host: HostPage, page: np.ndarray) -> None:
        assert self._store is not None
        with self._writing:
            if host.is_trusted:
                self._store.store(host.digest, host.tokens, page)

    def _place(self, host: HostPage) -> np.ndarray:
        if self._memory is None:
            self._memory = np.empty((self._num_pages, self._page_bytes), np.uint8)
        place: np.ndarray = self._memory[host.place]
        return place
