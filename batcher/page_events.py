"""What becomes of pages that requests can find as prefixes, for those who follow it from outside, such as routers."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple, Protocol

from batcher.request import Request


class Medium(StrEnum):
    """Where a page is, in vLLM's names."""

    DEVICE = "GPU"
    HOST = "CPU"


class PageStored(NamedTuple):
    """Requests can find a page on the device."""

    digest: bytes
    parent: bytes | None  # the digest of the page before it; None: it is the first of its prefix
    tokens: bytes  # i32[page_size]
    salt: int  # `Request.cache_salt`
    adapter: int  # `Request.adapter`


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
    """Who follows the pages."""

    def put(self, events: list[PageEvent]) -> bool:
        """Takes the events of a step, and returns at once. False: there is no room, and they are lost."""

    def close(self) -> None:
        """There are no more events. Blocks until those that were put are done with. May be called again."""


class PageEventRecorder:
    """Collects the events of a step. The engine's thread calls it; the sink does all else on threads of its own. It
    observes the pages of the device (`batcher.scheduling.pages.PageObserver`)."""

    def __init__(self, sink: PageEventSink) -> None:
        self._sink = sink
        self._events: list[PageEvent] = []
        self.num_told = 0  # events that the sink took
        self.num_lost = 0

    def stored_for(self, request: Request, parent: bytes | None, digest: bytes, tokens: bytes) -> None:
        """A page of the device, which the request has computed, can be found now."""
        self._events.append(PageStored(digest, parent, tokens, request.cache_salt, request.adapter))

    def copied(self, digest: bytes, medium: Medium) -> None:
        """A page that can be or could be found on the device is in another medium, too."""
        self._events.append(PageCopied(digest, medium))

    def removed(self, digest: bytes, medium: Medium) -> None:
        """A page is no longer in this medium."""
        self._events.append(PageRemoved(digest, medium))

    def all_removed(self, medium: Medium) -> None:
        """No page is in this medium any more."""
        self._events.append(PagesCleared(medium))

    def tell(self) -> None:
        """Hands the events since the last call to the sink."""
        if not self._events:
            return
        events, self._events = self._events, []
        if self._sink.put(events):
            self.num_told += len(events)
        else:
            self.num_lost += len(events)

    # --- what the pool of the device's pages says ---

    def stored(self, page: int, digest: bytes, tokens: bytes) -> None:
        """`stored_for` says more."""

    def released(self, page: int, digest: bytes, tokens: bytes) -> None:
        """The page can still be found."""

    def acquired(self, page: int) -> None:
        """The page could be found before."""

    def evicted(self, page: int, digest: bytes, tokens: bytes) -> None:
        self.removed(digest, Medium.DEVICE)

    def forgotten(self, page: int | None, digest: bytes) -> None:
        if page is not None:
            self.removed(digest, Medium.DEVICE)

    def cleared(self) -> None:
        self.all_removed(Medium.DEVICE)
