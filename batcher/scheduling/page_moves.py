"""Pages that leave the device and come back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(eq=False, slots=True)
class HostPage:
    """A page in the host's memory. Its bytes are the mover's."""

    place: int  # in the host's memory
    digest: bytes
    tokens: bytes
    is_coming: bool = True  # a copy that is on its way brings its bytes
    is_trusted: bool = True  # False: its K/V are not to be found again, in the store neither
    num_keepers: int = 0  # prompts that are kept for other engines; it is not evicted before they go
    checksum: int | None = None  # of its bytes; None: they are not there. Only the mover reads and writes it


class AwayPage(NamedTuple):
    """A page to load: from the host's memory, or, without `host`, from another engine or the store."""

    digest: bytes
    tokens: bytes
    host: HostPage | None


@dataclass(eq=False, slots=True)
class PageSave:
    """Pages of the device on their way to the host's memory, at most `pages_of_copy`."""

    pages: list[int] = field(default_factory=list)  # of the device
    hosts: list[HostPage] = field(default_factory=list)


@dataclass(eq=False, kw_only=True, slots=True)
class PageLoad:
    """Pages on their way to a row that waits for them."""

    first: int  # index of the first one among the row's pages
    away: list[AwayPage]
    pages: list[int]  # on the device, where they go
    give_up_s: float  # by the clock: when computing them would be done
    asked_s: float
    num_written: int = 0
    is_cut: bool = False  # a page is lost, and none after it comes. Only the mover reads and writes it
    is_wanted: bool = True  # False: its row waits for it no longer
    from_store: int = field(init=False)  # how many

    def __post_init__(self) -> None:
        self.from_store = sum(page.host is None for page in self.away)


@dataclass(kw_only=True, slots=True)
class OffloadingCounts:
    """Of pages that leave the device. Pages, unless it says tokens."""

    # gauges
    num_places: int = 0  # of the host's memory
    num_held: int = 0  # in the host's memory
    num_kept: int = 0  # of these, for other engines
    num_in_store: int = 0
    bytes_in_store: int = 0
    # counters
    num_saved: int = 0  # copied to the host's memory
    num_lost: int = 0  # evicted from the device without a copy
    num_loaded: int = 0  # from the host's memory
    num_loaded_from_store: int = 0
    num_fetched: int = 0  # from other engines, and from the store for the same requests
    fetched_bytes: int = 0  # of these pages
    num_not_loaded: int = 0  # asked for, and computed in the end
    num_broken: int = 0  # their bytes had changed in the host's memory or in the store
    num_failed: int = 0  # reads and writes of the store
    num_unwritten: int = 0  # the store was too slow for them
    num_prompts_lost: int = 0  # of which a page did not come from another engine
    num_query_tokens: int = 0  # of prompts, looked up after those that the device has
    num_hit_tokens: int = 0  # of these, loaded
