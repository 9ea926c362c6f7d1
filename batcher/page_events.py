"""Events about pages that requests can find as prefixes, for followers outside the engine, such as routers."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple, Protocol


class Medium(StrEnum):
    """The place of a page, by its name in vLLM."""

    DEVICE = "GPU"
    HOST = "CPU"


class PageStored(NamedTuple):
    """A page on the device was stored: requests can find it."""

    digest: bytes
    parent: bytes | None  # the digest of the page before it; None: it is the first of its prefix
    tokens: bytes  # i32[page_size]
    salt: int  # `Request.cache_salt`
    adapter: int  # `Request.adapter`
    model: int = 0  # `Request.model`


class PageCopied(NamedTuple):
    """A page that was stored on the device is in another medium, too."""

    digest: bytes
    medium: Medium


class PageRemoved(NamedTuple):
    """A page is no longer in this medium."""

    digest: bytes
    medium: Medium


class PagesCleared(NamedTuple):
    """No page is in this medium any more."""

    medium: Medium


PageEvent = PageStored | PageCopied | PageRemoved | PagesCleared


class PageEventSink(Protocol):
    """A follower of the pages."""

    def put(self, events: list[PageEvent]) -> bool:
        """Takes the events of a step, and returns at once. False: there is no room, and they are lost."""

    def close(self) -> None:
        """There are no more events. Blocks until those that were put are done with. May be called again."""


class PageObserver:
    """Is told what happens to the device's stored pages. The pool calls it inside its own methods, so it must call none
    of them. A page's `tokens` are the bytes of i32[page_size]. By default, all calls are ignored."""

    def stored(self, page: int, digest: bytes, tokens: bytes) -> None:
        """A used page can be found now."""

    def released(self, page: int, digest: bytes, tokens: bytes) -> None:
        """No request holds the stored page any more: it has become reusable."""

    def acquired(self, page: int) -> None:
        """A reusable page is used again."""

    def evicted(self, page: int, digest: bytes, tokens: bytes) -> None:
        """A reusable page is given to a request, which will write to it."""

    def forgotten(self, page: int | None, digest: bytes) -> None:
        """The K/V of this digest are not to be trusted. `page` has them, unless the pool does not know the digest."""

    def cleared(self) -> None:
        """All stored pages are forgotten."""


class PageEventRecorder(PageObserver):
    """Collects the events of a step. The engine's thread calls it; the sink does all else on threads of its own."""

    def __init__(self, sink: PageEventSink) -> None:
        self._sink = sink
        self._events: list[PageEvent] = []
        self.num_told = 0  # events that the sink took
        self.num_lost = 0

    def add(self, event: PageEvent) -> None:
        self._events.append(event)

    def tell(self) -> None:
        """Hands the events since the last call to the sink."""
        if not self._events:
            return
        events, self._events = self._events, []
        if self._sink.put(events):
            self.num_told += len(events)
        else:
            self.num_lost += len(events)

    def evicted(self, page: int, digest: bytes, tokens: bytes) -> None:
        self.add(PageRemoved(digest, Medium.DEVICE))

    def forgotten(self, page: int | None, digest: bytes) -> None:
        if page is not None:
            self.add(PageRemoved(digest, Medium.DEVICE))

    def cleared(self) -> None:
        self.add(PagesCleared(Medium.DEVICE))
