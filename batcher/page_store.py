"""The interface to a place of pages outside the device and the host's memory, and the settings of both.

A `PageStore` extends the host's memory: it stores pages that leave the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np


class PageStore(Protocol):
    """Pages that this engine, or an earlier one, has written, by their digest. All methods are thread-safe. No method
    raises for a page that is missing or broken, or for a full disk."""

    num_broken: int  # pages that were found damaged
    num_failed: int  # reads and writes that failed, and pages that were not written for that reason

    @property
    def num_pages(self) -> int:
        """The number of pages in the store, as far as it is known."""

    @property
    def bytes_on_disk(self) -> int:
        """The number of bytes of the pages in the store, as far as it is known."""

    def has(self, digest: bytes) -> bool:
        """Whether the page is probably there. The call is quick and reads nothing."""

    def load(self, digest: bytes, tokens: bytes, page: np.ndarray) -> bool:
        """Reads a page into `page`, u8[page_bytes]. Returns False if it is missing, broken, or a page of other tokens.

        Args:
            tokens: the bytes of the page's tokens, i32[page_size].
        """

    def store(self, digest: bytes, tokens: bytes, page: np.ndarray) -> bool:
        """Writes a page, unless it is there. Returns False if it could not be written."""

    def clear(self) -> None:
        """Forgets all pages: later calls do not find them."""

    def close(self) -> None:
        """Ends the work in the background. No method is called afterwards."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Offloading:
    """The settings of an engine whose pages leave the device."""

    host_bytes: int  # bytes of the host's memory that hold pages
    store: PageStore | None = None  # extends the host's memory; None: there is no store
