"""Which pages the host's memory holds, which ones go there, and which ones come back to the device.

The prefix cache of the device ends where its pages end. Behind it are the host's memory and, if there is one, a store
(`batcher/page_store.py`). A page that leaves keeps its digest, by which a later request finds it, and its tokens, which
are compared as for a page of the device.

1. A stored page is saved before it is evicted. When few pages are free, the reusable pages that are evicted next are
   saved ahead, more at a time if more of them are missing. What an admission evicts unsaved is saved in the step of
   the eviction, before the step writes to the page. With a store every stored page is saved, so a restart finds it. At
   most `MAX_PAGE_COPIES` copies are on their way at a time, and what there is no copy for is lost.
2. If the host's memory is full, the least recently used page there makes room.
3. A request is admitted with all its pages. The stored prefix of the device comes first. Of the pages that follow,
   those that are away are loaded, if this is expected to be quicker than computing them. The row waits meanwhile, and
   others compute. It goes on with the pages that have come when all have, when one cannot be read, or when they have
   taken as long as computing them would have.
4. A request whose next missing page another one loads waits for it, as for a page that a step computes.
5. The pages of a prompt that another engine will take are saved as soon as they are full, and are not evicted from the
   host's memory until they have been taken or some time has passed. They are half of it at most.
6. Pages that another engine has computed for a request are loaded, however long computing them would take here: this
   engine's steps are kept free of prompts. What the other engine loses is computed.

All work on the bytes is done by `batcher/requests/page_mover.py` in the order in which it is asked for: here are only
the decisions, and they are the engine's thread's.
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
from batcher.scheduling.kept_prompts import DevicePage, KeptPrompts
from batcher.scheduling.page_moves import AwayPage, HostPage, OffloadingCounts, PageLoad, PageSave
from batcher.scheduling.pages import PagePool
from batcher.scheduling.request_state import RequestState
from batcher.step import MAX_PAGE_COPIES, Capacity

_PATIENCE_S = 1.0  # that every load is given
_WEIGHT = 0.2  # of the newest time in a mean
_RETRY = 0.95  # a source that does not pay is tried again after some refusals: its time is taken to be shorter by this


class Times:
    """Means of measured times, in seconds: of computing a token of a prompt, and of loading a page."""

    def __init__(self) -> None:
        self._of_token: float | None = None
        self._of_page: dict[bool, float] = {}  # by whether it is in the host's memory

    def computed(self, seconds: float, num_tokens: int) -> None:
        """A step with prompts has taken so long."""
        self._of_token = _mean(self._of_token, seconds / num_tokens)

    def loaded(self, seconds: float, load: PageLoad) -> None:
        """A load has taken so long, with the time in which it waited for others."""
        source = load.from_store == 0
        self._of_page[source] = _mean(self._of_page.get(source), seconds / len(load.away))

    def of_tokens(self, count: int) -> float:
        """Of computing so many; 0 if it is not known."""
        return count * (self._of_token or 0.0)

    def pays(self, page: AwayPage, page_size: int) -> bool:
        """Whether loading the page is expected to be quicker than computing it. What is not known is tried."""
        source = page.host is not None
        of_page = self._of_page.get(source)
        if self._of_token is None or of_page is None or of_page < self.of_tokens(page_size):
            return True
        self._of_page[source] = of_page * _RETRY
        return False


class OffloadedPages(PageObserver):
    """See the module's docstring.

    Args:
        clock: seconds from any origin.
    """

    def __init__(self, offloading: Offloading, capacity: Capacity, pool: PagePool, clock: Callable[[], float]) -> None:
        self.num_pages = offloading.host_bytes // capacity.page_bytes
        if not self.num_pages:
            raise ValueError(
                f"the host's memory has no room for a page of {capacity.page_bytes} bytes: {offloading.host_bytes=}"
            )
        self._store, self._tiers = offloading.store, offloading.tiers
        self._keep_s = offloading.keep_s
        self._saves_all = self._store is not None or self._keep_s is not None
        self._pages_of_copy, self._page_bytes = capacity.pages_of_copy, capacity.page_bytes
        self._page_size = capacity.page_size
        self._ahead = min(capacity.pages_per_seq, capacity.num_pages)
        self._pool, self._clock = pool, clock
        self._places = list(range(self.num_pages - 1, -1, -1))  # of the host's memory, without a page
        self._index: OrderedDict[bytes, HostPage] = OrderedDict()  # least recently used first
        # By page of the device its digest and tokens; the next to be saved first.
        self._unsaved: OrderedDict[int, tuple[bytes, bytes]] = OrderedDict()
        self._moves: list[PageSave | PageLoad] = []  # to begin before the step that is planned now
        self._saves: list[PageSave] = []  # begun or about to
        self._loads: dict[PageLoad, RequestState] = {}
        self._loading: set[bytes] = set()
        self.kept = KeptPrompts(self.num_pages // 2, pool.release)
        self.times = Times()
        self.events: PageEventRecorder | None = None
        self.counts = OffloadingCounts(num_places=self.num_pages)

    @property
    def is_loading_any(self) -> bool:
        """Whether rows wait for pages."""
        return bool(self._loads)

    # --- what happens to the device's pages ---

    def stored(self, page: int, digest: bytes, tokens: bytes) -> None:
        if self._saves_all and digest not in self._index and not (self._store and self._store.has(digest)):
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
        self.kept.cut(digest)
        host = self._index.pop(digest, None)
        if host is not None:
            host.is_trusted = False
            self._places.append(host.place)
            self._tell(PageRemoved(digest, Medium.HOST))

    def cleared(self) -> None:
        self._unsaved.clear()
        self.kept.cut()
        for host in self._index.values():
            host.is_trusted = False
            self._places.append(host.place)
        self._index.clear()
        self._tell(PagesCleared(Medium.HOST))

    # --- to the host ---

    def take_moves(self) -> list[PageSave | PageLoad]:
        """The saves and loads to begin now, in this order and before the next step."""
        moves, self._moves = self._moves, []
        return moves

    def save_ahead(self) -> None:
        """Rule 1. Not in each step, but many pages at a time. Called before a step is planned: the pages that it will
        fill are stored while it is planned, and have nothing yet."""
        self._save_kept()
        if not self._unsaved:
            return
        if self._saves_all:
            if len(self._unsaved) < self._pages_of_copy // 4 and self._pool.num_used:
                return
        elif self._pool.num_free >= self._ahead:
            return
        elif self._pool.num_reusable - len(self._unsaved) > max(0, self._ahead - self._pages_of_copy):
            return  # as good as all pages that are saved already are evicted before the others
        num_safe = self._pool.num_available - len(self._unsaved)  # pages that can be given without a loss
        for _ in range(min(max(self._pages_of_copy, self._ahead - num_safe), len(self._unsaved))):
            page, (digest, tokens) = self._unsaved.popitem(last=False)
            if not self._save(page, digest, tokens):
                self._unsaved[page] = digest, tokens
                self._unsaved.move_to_end(page, last=False)
                return

    def _save_kept(self) -> None:
        """Rule 5, for what was not saved before the end of the request."""
        for prompt in self.kept.unsaved():
            while prompt.num_to_come:
                page = prompt.next()
                if not self.kept.has_room_for(self._index.get(page.digest)):
                    prompt.cut()
                elif self._save(*page):
                    self.kept.keep(prompt, self._index[page.digest])
                else:
                    break

    def _save(self, page: int, digest: bytes, tokens: bytes) -> bool:
        """False: too many pages are on their way."""
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
        """Rules 2 and 5. None: all pages there are still coming."""
        if self._places:
            return self._places.pop()
        while (oldest := next(iter(self._index.values()))).num_keepers:  # of less than half the pages
            self._index.move_to_end(oldest.digest)
        if oldest.is_coming:
            return None
        del self._index[oldest.digest]
        self._tell(PageRemoved(oldest.digest, Medium.HOST))
        return oldest.place

    def _tell(self, event: PageEvent) -> None:
        if self.events is not None:
            self.events.add(event)

    def keep(self, seq: RequestState) -> None:
        """Rule 5. The request ends, and holds its pages."""
        if self._keep_s is None or not seq.output:
            return
        size = self._page_size
        count = min(seq.num_committed, (seq.num_prompt - 1) // size)
        pages = [DevicePage(seq.pages[i], seq.digests[i], seq.page_bytes(i, size)) for i in range(count)]
        self._pool.acquire(seq.pages[:count])
        self.kept.add(seq.request.keep_as, self._clock() + self._keep_s, pages)

    def end_save(self, save: PageSave, error: Exception | None) -> None:
        """The pages are in the host's memory, or have not been copied."""
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
        """Rule 4: whether a row waits for the page."""
        return digest in self._loading

    def find(self, seq: RequestState, first: int, stop: int) -> list[AwayPage]:
        """Rules 3 and 6: the pages of a request to load, from index `first` on; none from `stop` on."""
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
            if seq.request.source is None and not self.times.pays(page, self._page_size):
                break
            away.append(page)
        for page in away:
            if page.host is not None:
                self._index.move_to_end(page.digest)  # pages that the request evicts from the device do not replace it
        return away

    def _is_away(self, digest: bytes) -> bool:
        """Whether another engine or the store has the page."""
        return any(tier.has(digest) for tier in self._tiers)

    def load(self, seq: RequestState, first: int, away: list[AwayPage]) -> None:
        """The request has pages, and these are to come to those from index `first` on."""
        now, source = self._clock(), seq.request.source
        patience_s = self.times.of_tokens(len(away) * self._page_size) if source is None else source.keep_s
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
        """All pages of the load have come, or no more of them will be taken. Returns the request that waits for it."""
        seq = self._loads.pop(load)
        seq.load, load.is_wanted = None, False
        self._loading.difference_update(page.digest for page in load.away)
        if load.num_written == len(load.away) and seq.request.source is None:
            self.times.loaded(self._clock() - load.asked_s, load)
        from_store = sum(page.host is None for page in load.away[: load.num_written])
        self.counts.num_loaded += load.num_written - from_store
        if seq.request.source is None:
            self.counts.num_loaded_from_store += from_store
        else:
            self.counts.num_fetched += from_store
            self.counts.fetched_bytes += from_store * self._page_bytes
        self.counts.num_not_loaded += len(load.away) - load.num_written
        return seq

    def held(self) -> OffloadingCounts:
        """The counts, with the gauges of now."""
        self.counts.num_held, self.counts.num_kept = len(self._index), self.kept.num_pages
        return self.counts

    def next_deadline(self) -> float | None:
        """When the first load is to be given up, by the clock."""
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
        assert self.kept.num_pages <= self.num_pages // 2
        assert all(seq.load is load for load, seq in self._loads.items()), "a load has lost its row"


def _mean(mean: float | None, newest: float) -> float:
    return newest if mean is None else (1 - _WEIGHT) * mean + _WEIGHT * newest
