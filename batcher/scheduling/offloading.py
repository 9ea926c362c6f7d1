"""Which pages the host's memory holds, which pages go there, and which pages come back to the device.

The host's memory extends the prefix cache of the device, and a store (`batcher/page_store.py`), if there is one,
extends the host's memory. A page that leaves the device keeps its digest, by which a later request finds it, and its
tokens, which are compared in the same way as for a page of the device.

1. A stored page is saved before it is evicted. When few pages are free, the reusable pages that are evicted next are
   saved ahead; the fewer pages are free, the more are saved at a time. An unsaved page that an admission evicts is
   saved in the step of the eviction, before the step writes to it. With a store, every stored page is saved, so a
   restart finds it. At most `MAX_PAGE_COPIES` copies run at a time; a page for which there is no copy is lost.
2. If the host's memory is full, the least recently used page there is evicted.
3. A request is admitted with all its pages. The prefix that the device stores comes first. Pages that follow and are
   away are loaded, if this is expected to be faster than computing them. The row waits, and other rows compute. It goes
   on with the pages that have arrived: when all have, when one cannot be read, or when loading has taken as long as
   computing would have.
4. A request whose next missing page is being loaded for another request waits for it, as for a page that a step
   computes.

This module only decides; the engine's thread calls it. `batcher/requests/page_mover.py` does all work on the bytes, in
the order in which it is asked.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from batcher.page_events import (
    Medium,
    PageCopied,
    PageEvent,
    PageEventRecorder,
    PageObserver,
    PageRemoved,
    PagesCleared,
)
from batcher.page_store import Offloading
from batcher.scheduling.page_moves import AwayPage, HostPage, OffloadingCounts, PageLoad, PageSave
from batcher.scheduling.pages import PagePool
from batcher.scheduling.request_state import RequestState
from batcher.step import MAX_PAGE_COPIES, Capacity

_PATIENCE_S = 1.0  # the least time before a load is given up
_WEIGHT = 0.2  # weight of the newest time in a mean
_RETRY = 0.95  # factor on a source's time at each refusal, so that the source is tried again after some refusals


class Times:
    """Means of measured times, in seconds: of computing one token of a prompt, and of loading one page."""

    def __init__(self) -> None:
        self._of_token: float | None = None
        self._of_page: dict[bool, float] = {}  # whether the page is in the host's memory -> time

    def computed(self, seconds: float, num_tokens: int) -> None:
        """Records the time of a step with `num_tokens` tokens of prompts."""
        self._of_token = _mean(self._of_token, seconds / num_tokens)

    def loaded(self, seconds: float, load: PageLoad) -> None:
        """Records the time of a load, which includes the time in which it waited for other loads."""
        source = load.from_store == 0
        self._of_page[source] = _mean(self._of_page.get(source), seconds / len(load.away))

    def of_tokens(self, count: int) -> float:
        """The expected seconds for computing `count` tokens of a prompt; 0 if no step has been measured."""
        return count * (self._of_token or 0.0)

    def pays(self, page: AwayPage, page_size: int) -> bool:
        """Whether loading the page is expected to be faster than computing it. True if a time is not known yet."""
        source = page.host is not None
        of_page = self._of_page.get(source)
        if self._of_token is None or of_page is None or of_page < self.of_tokens(page_size):
            return True
        self._of_page[source] = of_page * _RETRY
        return False


class OffloadedPages(PageObserver):
    """The pages in the host's memory, and the moves between it and the device, by the rules in the module's docstring.

    Args:
        clock: gives seconds from any origin.
    """

    def __init__(self, offloading: Offloading, capacity: Capacity, pool: PagePool, clock: Callable[[], float]) -> None:
        self.num_pages = offloading.host_bytes // capacity.page_bytes
        if not self.num_pages:
            raise ValueError(
                f"the host's memory has no room for a page of {capacity.page_bytes} bytes: {offloading.host_bytes=}"
            )
        self._store = offloading.store
        self._saves_all = self._store is not None
        self._pages_of_copy = capacity.pages_of_copy
        self._page_size = capacity.page_size
        self._ahead = min(capacity.pages_per_seq, capacity.num_pages)
        self._pool, self._clock = pool, clock
        self._places = list(range(self.num_pages - 1, -1, -1))  # places of the host's memory without a page
        self._index: OrderedDict[bytes, HostPage] = OrderedDict()  # least recently used first
        # Page of the device -> its digest and tokens. The next page to be saved comes first.
        self._unsaved: OrderedDict[int, tuple[bytes, bytes]] = OrderedDict()
        self._moves: list[PageSave | PageLoad] = []  # start before the step that is planned now
        self._saves: list[PageSave] = []  # saves that have started or are about to
        self._loads: dict[PageLoad, RequestState] = {}
        self._loading: set[bytes] = set()
        self.times = Times()
        self.events: PageEventRecorder | None = None
        self.counts = OffloadingCounts(num_places=self.num_pages)

    @property
    def is_loading_any(self) -> bool:
        """Whether rows wait for pages."""
        return bool(self._loads)

    # --- what happens to the device's pages ---

    def stored(self, page: int, digest: bytes, tokens: bytes) -> None:
        if self._saves_all and digest not in self._index and not self._is_away(digest):
            self._unsaved[page] = digest, tokens

    def released(self, page: int, digest: bytes, tokens: bytes) -> None:
        if not self._saves_all and digest not in self._index:
            self._unsaved[page] = digest, tokens

    def acquired(self, page: int) -> None:
        if not self._saves_all:
            self._unsaved.pop(page, None)

    def evicted(self, page: int, digest: bytes, tokens: bytes) -> None:
        self._unsaved.pop(page, None)
        if digest in self._index:
            self._index.move_to_end(digest)
        elif not self._save(page, digest, tokens) and not self._is_away(digest):
            self.counts.num_lost += 1

    def forgotten(self, page: int | None, digest: bytes) -> None:
        if page is not None:
            self._unsaved.pop(page, None)
        host = self._index.pop(digest, None)
        if host is not None:
            host.is_trusted = False
            self._places.append(host.place)
            self._tell(PageRemoved(digest, Medium.HOST))

    def cleared(self) -> None:
        self._unsaved.clear()
        for host in self._index.values():
            host.is_trusted = False
            self._places.append(host.place)
        self._index.clear()
        self._tell(PagesCleared(Medium.HOST))

    # --- to the host ---

    def take_moves(self) -> list[PageSave | PageLoad]:
        """The saves and loads to start now, in this order and before the next step."""
        moves, self._moves = self._moves, []
        return moves

    def save_ahead(self) -> None:
        """Saves pages ahead by rule 1: many pages at a time, not some in each step. It must be called before a step is
        planned. Planning stores the pages that the step will fill, and these have no K/V yet."""
        if not self._unsaved:
            return
        if self._saves_all:
            if len(self._unsaved) < self._pages_of_copy // 4 and self._pool.num_used:
                return
        elif self._pool.num_free >= self._ahead:
            return
        elif self._pool.num_reusable - len(self._unsaved) > max(0, self._ahead - self._pages_of_copy):
            return  # enough saved pages are evicted before the unsaved ones
        num_safe = self._pool.num_available - len(self._unsaved)  # pages that can be given without a loss
        for _ in range(min(max(self._pages_of_copy, self._ahead - num_safe), len(self._unsaved))):
            page, (digest, tokens) = self._unsaved.popitem(last=False)
            if not self._save(page, digest, tokens):
                self._unsaved[page] = digest, tokens
                self._unsaved.move_to_end(page, last=False)
                return

    def _save(self, page: int, digest: bytes, tokens: bytes) -> bool:
        """Adds a page to a save. Returns False if too many copies are on their way."""
        if digest in self._index:  # another page of the device had the same K/V
            return True
        save = self._moves[-1] if self._moves else None
        is_open = isinstance(save, PageSave) and len(save.pages) < self._pages_of_copy
        if not is_open and len(self._saves) == MAX_PAGE_COPIES:
            return False
        place = self._free_place()
        if place is None:
            return False
        if not isinstance(save, PageSave) or not is_open:
            save = PageSave()
            self._saves.append(save)
            self._moves.append(save)
        host = self._index[digest] = HostPage(place, digest, tokens)
        save.pages.append(page)
        save.hosts.append(host)
        return True

    def _free_place(self) -> int | None:
        """A place in the host's memory, from which rule 2 may evict a page. None: all pages there are still
        being copied."""
        if self._places:
            return self._places.pop()
        oldest = next(iter(self._index.values()))
        if oldest.is_coming:
            return None
        del self._index[oldest.digest]
        self._tell(PageRemoved(oldest.digest, Medium.HOST))
        return oldest.place

    def _tell(self, event: PageEvent) -> None:
        if self.events is not None:
            self.events.add(event)

    def end_save(self, save: PageSave, error: Exception | None) -> None:
        """Records the end of a save. With an error, its pages have not been copied."""
        self._saves.remove(save)
        for host in save.hosts:
            host.is_coming = False
        if error is None:
            self.counts.num_saved += len(save.pages)
            for host in save.hosts:
                if self._index.get(host.digest) is host:
                    self._tell(PageCopied(host.digest, Medium.HOST))
            return
        self.counts.num_lost += len(save.pages)
        for host in save.hosts:
            if self._index.get(host.digest) is host:
                self.forgotten(None, host.digest)

    # --- back to the device ---

    def is_loading(self, digest: bytes) -> bool:
        """Whether a row waits for the page (rule 4)."""
        return digest in self._loading

    def find(self, seq: RequestState, first: int, stop: int) -> list[AwayPage]:
        """The pages of a request to load by rule 3, from index `first` up to at most `stop`."""
        away: list[AwayPage] = []
        for index in range(first, stop):
            digest = seq.digests[index]
            host = self._index.get(digest)
            if host is None and not self._is_away(digest):
                break
            tokens = seq.page_bytes(index, self._page_size)
            if host is not None and host.tokens != tokens:
                break
            page = AwayPage(digest, tokens, host)
            if not self.times.pays(page, self._page_size):
                break
            away.append(page)
        for page in away:
            if page.host is not None:
                self._index.move_to_end(page.digest)  # pages that the request evicts must not replace it
        return away

    def _is_away(self, digest: bytes) -> bool:
        """Whether the store has the page."""
        return self._store is not None and self._store.has(digest)

    def load(self, seq: RequestState, first: int, away: list[AwayPage]) -> None:
        """Starts a load of the pages `away` into the pages of the request, from index `first` on."""
        now = self._clock()
        patience_s = self.times.of_tokens(len(away) * self._page_size)
        load = PageLoad(
            first=first,
            away=away,
            pages=seq.pages[first : first + len(away)],
            asked_s=now,
            give_up_s=now + max(_PATIENCE_S, patience_s),
        )
        seq.load = load
        self._loads[load] = seq
        self._moves.append(load)
        self._loading.update(page.digest for page in away)

    def end_load(self, load: PageLoad) -> RequestState:
        """Ends a load: all of its pages have arrived, or no more of them will be used. Returns the request that waits
        for it."""
        seq = self._loads.pop(load)
        seq.load, load.is_wanted = None, False
        self._loading.difference_update(page.digest for page in load.away)
        if load.num_written == len(load.away):
            self.times.loaded(self._clock() - load.asked_s, load)
        from_store = sum(page.host is None for page in load.away[: load.num_written])
        self.counts.num_loaded += load.num_written - from_store
        self.counts.num_loaded_from_store += from_store
        self.counts.num_not_loaded += len(load.away) - load.num_written
        return seq

    def held(self) -> OffloadingCounts:
        """The counts, with the present gauges."""
        self.counts.num_held = len(self._index)
        return self.counts

    def next_deadline(self) -> float | None:
        """The time, by the clock, at which the next load is given up; None: there is no load."""
        return min((load.give_up_s for load in self._loads), default=None)

    def overdue(self) -> list[PageLoad]:
        """The loads to give up now."""
        now = self._clock()
        return [load for load in self._loads if load.give_up_s <= now]

    def check_integrity(self) -> None:
        """Raises AssertionError if the places of the host's memory are inconsistent."""
        places = [page.place for page in self._index.values()] + self._places
        assert sorted(places) == list(range(self.num_pages)), "a place of the host's memory is lost or held twice"
        assert all(page.is_trusted for page in self._index.values())
        assert all(self._index[page.digest] is page for page in self._index.values())
        assert all(seq.load is load for load, seq in self._loads.items()), "a load has lost its row"


def _mean(mean: float | None, newest: float) -> float:
    return newest if mean is None else (1 - _WEIGHT) * mean + _WEIGHT * newest
