"""Pages that leave the device and come back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(eq=False, slots=True)
class HostPage:
    """A page in the host's memory. Only the page mover accesses its bytes."""

    place: int  # index in the host's memory
    digest: bytes
    tokens: bytes
    is_coming: bool = True  # the copy of its bytes has not ended
    is_trusted: bool = True  # False: later requests do not find it, nor does the store get it
    checksum: int | None = None  # checksum of its bytes; None: they have not arrived. Only the mover writes it


class AwayPage(NamedTuple):
    """A page to load. Without `host` it comes from the store, otherwise from the host's memory."""

    digest: bytes
    tokens: bytes
    host: HostPage | None


@dataclass(eq=False, slots=True)
class PageSave:
    """Pages of the device on their way to the host's memory, at most `pages_of_copy`."""

    pages: list[int] = field(default_factory=list)  # page ids on the device
    hosts: list[HostPage] = field(default_factory=list)


@dataclass(eq=False, kw_only=True, slots=True)
class PageLoad:
    """Pages on their way to a row that waits for them."""

    first: int  # index of the first loaded page among the row's pages
    away: list[AwayPage]
    pages: list[int]  # page ids on the device, to which they are loaded
    give_up_s: float  # time, by the clock, at which computing them would be done
    asked_s: float
    num_written: int = 0
    is_cut: bool = False  # a page is lost, so no page after it comes. Only the mover reads and writes it
    is_wanted: bool = True  # False: its row no longer waits for it
    from_store: int = field(init=False)  # number of pages that come from the store

    def __post_init__(self) -> None:
        self.from_store = sum(page.host is None for page in self.away)


@dataclass(kw_only=True, slots=True)
class OffloadingCounts:
    """Counts of pages that leave the device and come back. Fields count pages, unless their names say otherwise."""

    # gauges
    num_places: int = 0  # pages for which the host's memory has room
    num_held: int = 0  # pages in the host's memory
    num_in_store: int = 0
    bytes_in_store: int = 0
    # counters
    num_saved: int = 0  # copied to the host's memory
    num_lost: int = 0  # evicted from the device without a copy
    num_loaded: int = 0  # loaded from the host's memory
    num_loaded_from_store: int = 0
    num_not_loaded: int = 0  # asked for, but computed in the end
    num_broken: int = 0  # pages whose bytes had changed in the host's memory or in the store
    num_failed: int = 0  # failed reads and writes of the store
    num_unwritten: int = 0  # not written, because the store was too slow
    num_query_tokens: int = 0  # prompt tokens that were looked up, after those that the device has
    num_hit_tokens: int = 0  # looked-up tokens that were loaded
