"""Where pages go that leave the device: the host's memory, and behind it what `PageStore` is the interface to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np


class PageStore(Protocol):
    """Pages by their digest. Thread-safe. No method raises for a page that is missing or broken, or for a full disk."""

    num_broken: int  # pages found to be damaged
    num_failed: int  # reads and writes that failed, and pages that were not written for that reason

    @property
    def num_pages(self) -> int:
        """All that are there, as far as it is known."""

    @property
    def bytes_on_disk(self) -> int:
        """Of these."""

    def has(self, digest: bytes) -> bool:
        """Whether the page is likely to be there. Quick: nothing is read."""

    def load(self, digest: bytes, tokens: bytes, page: np.ndarray) -> bool:
        """Reads a page into `page`, u8[page_bytes]. False: it is not there, is broken, or is of other tokens.

        Args:
            tokens: of the page, i32[page_size].
        """

    def store(self, digest: bytes, tokens: bytes, page: np.ndarray) -> bool:
        """Writes a page, unless it is there. False: it could not be written."""

    def clear(self) -> None:
        """Forgets all pages: later calls do not find them."""

    def close(self) -> None:
        """Ends what runs in the background. No other call is made afterwards."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Offloading:
    """The settings of an engine whose pages leave the device."""

    host_bytes: int  # of the host's memory
    store: PageStore | None = None  # behind the host's memory
