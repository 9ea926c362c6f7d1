"""Where pages go that leave the device: the host's memory, and behind it what `PageStore` is the interface to.

Pages also come from other engines (`RemotePages`), which have computed them for a request of this one and keep them in
their host's memory until they are taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:  # the HTTP process knows sources, without numpy
    import numpy as np


class PageTier(Protocol):
    """Pages that are not in the host's memory, by their digest. Thread-safe, but for `load` of `RemotePages`. No method
    raises for a page that is missing or broken."""

    def has(self, digest: bytes) -> bool:
        """Whether the page is likely to be there. Quick: nothing is read."""

    def load(self, digest: bytes, tokens: bytes, page: np.ndarray) -> bool:
        """Reads a page into `page`, u8[page_bytes]. False: it is not there, is broken, or is of other tokens.

        Args:
            tokens: of the page, i32[page_size].
        """

    def clear(self) -> None:
        """Forgets all pages: later calls do not find them."""

    def close(self) -> None:
        """Ends what runs in the background. No other call is made afterwards."""


class PageStore(PageTier, Protocol):
    """Pages that this engine, or one before it, has written. No method raises for a full disk."""

    num_broken: int  # pages found to be damaged
    num_failed: int  # reads and writes that failed, and pages that were not written for that reason

    @property
    def num_pages(self) -> int:
        """All that are there, as far as it is known."""

    @property
    def bytes_on_disk(self) -> int:
        """Of these."""

    def store(self, digest: bytes, tokens: bytes, page: np.ndarray) -> bool:
        """Writes a page, unless it is there. False: it could not be written."""


class KeptPage(NamedTuple):
    """A page that an engine keeps for another one."""

    tokens: bytes
    checksum: int  # XXH3, 64 bits, of what `page` should hold
    page: np.ndarray  # u8[page_bytes]


class NoPage(Enum):
    """Why there is no such page."""

    NOT_YET = auto()  # it is on its way to the host
    NEVER = auto()


@dataclass(frozen=True, kw_only=True, slots=True)
class PageSource:
    """Where the first pages of a prompt can be taken from."""

    address: str  # of the engine that has them
    key: str  # the public key of its socket
    token: bytes  # by which it gives them
    keep_s: float  # that it keeps them


class RemotePages(PageTier, Protocol):
    """Pages of other engines. One thread calls `load`."""

    num_failed: int  # prompts of which a page did not come

    def expect(self, digests: Sequence[bytes], source: PageSource) -> None:
        """The first pages of a prompt can be had, each once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Offloading:
    """The settings of an engine whose pages leave the device."""

    host_bytes: int  # of the host's memory
    store: PageStore | None = None  # behind the host's memory
    remote: RemotePages | None = None  # None: no request has a `source`
    keep_s: float | None = None  # that pages are kept for other engines; None: no request has a `keep_as`

    @property
    def tiers(self) -> list[PageTier]:
        """What is behind the host's memory, in the order in which it is asked."""
        return [tier for tier in (self.remote, self.store) if tier is not None]
