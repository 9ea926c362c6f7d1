"""The interfaces to places of pages outside the device and the host's memory, and the settings of these places.

A `PageStore` extends the host's memory: it stores pages that leave the device. Pages also come from other engines
(`RemotePages`), which have computed them for a request of this engine and keep them in their host's memory until they
are taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:  # the HTTP process uses `PageSource` without numpy
    import numpy as np


class PageTier(Protocol):
    """Pages outside the host's memory, by their digest. All methods are thread-safe, except `RemotePages.load`. No
    method raises for a page that is missing or broken."""

    def has(self, digest: bytes) -> bool:
        """Whether the page is probably there. The call is quick and reads nothing."""

    def load(self, digest: bytes, tokens: bytes, page: np.ndarray) -> bool:
        """Reads a page into `page`, u8[page_bytes]. Returns False if it is missing, broken, or a page of other tokens.

        Args:
            tokens: the bytes of the page's tokens, i32[page_size].
        """

    def clear(self) -> None:
        """Forgets all pages: later calls do not find them."""

    def close(self) -> None:
        """Ends the work in the background. No method is called afterwards."""


class PageStore(PageTier, Protocol):
    """Pages that this engine, or an earlier one, has written. No method raises for a full disk."""

    num_broken: int  # pages that were found damaged
    num_failed: int  # reads and writes that failed, and pages that were not written for that reason

    @property
    def num_pages(self) -> int:
        """The number of pages in the store, as far as it is known."""

    @property
    def bytes_on_disk(self) -> int:
        """The number of bytes of the pages in the store, as far as it is known."""

    def store(self, digest: bytes, tokens: bytes, page: np.ndarray) -> bool:
        """Writes a page, unless it is there. Returns False if it could not be written."""


class KeptPage(NamedTuple):
    """A page that an engine keeps for another engine."""

    tokens: bytes
    checksum: int  # XXH3, 64 bits, of what `page` should hold
    page: np.ndarray  # u8[page_bytes]


class NoPage(Enum):
    """Why there is no such page."""

    NOT_YET = auto()  # it is on its way to the host
    NEVER = auto()


@dataclass(frozen=True, kw_only=True, slots=True)
class PageSource:
    """The engine from which the first pages of a prompt can be taken."""

    address: str  # the engine's address
    key: str  # the public key of the engine's socket
    token: bytes  # the name by which the engine keeps them
    keep_s: float  # seconds for which the engine keeps them


class RemotePages(PageTier, Protocol):
    """Pages of other engines. One thread calls `load`."""

    num_failed: int  # prompts of which a page did not arrive

    def expect(self, digests: Sequence[bytes], source: PageSource) -> None:
        """Announces that the first pages of a prompt can be loaded from `source`, each once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Offloading:
    """The settings of an engine whose pages leave the device."""

    host_bytes: int  # bytes of the host's memory that hold pages
    store: PageStore | None = None  # extends the host's memory; None: there is no store
    remote: RemotePages | None = None  # None: no request has a `source`
    keep_s: float | None = None  # seconds for which pages are kept for other engines; None: requests have no `keep_as`

    @property
    def tiers(self) -> list[PageTier]:
        """The places that are searched for pages that the host's memory does not have, in this order."""
        return [tier for tier in (self.remote, self.store) if tier is not None]
