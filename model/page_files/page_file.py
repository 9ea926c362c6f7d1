"""The file of one page: what its K/V are of, a checksum of everything, and the page's bytes.

    magic, format version, identity, digest, number of bytes of the tokens and of the page | tokens | checksum | page

All numbers are little-endian. The checksum is XXH3 of 64 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from hashlib import blake2b
from struct import Struct
from typing import Final

from xxhash import xxh3_64_intdigest

FORMAT_VERSION: Final = 2
DIGEST_BYTES: Final = 16  # bytes of the digests of identities and of pages
_MAGIC = b"kv-page\n"
_OF_WHAT = Struct(f"<8sI{DIGEST_BYTES}s{DIGEST_BYTES}sIQ")
_CHECKSUM = Struct("<Q")


@dataclass(frozen=True, kw_only=True, slots=True)
class PageIdentity:
    """All that decides the bytes of a page besides its digest. Pages are read only by who has the same."""

    weights: str  # digest of the model's content, see `model.loading.weights_digest`
    draft_weights: str  # digest of a draft model or head whose K/V are part of the page; "": there is none
    computation: str  # what computes the K/V: types, forms of weights and inputs, kernels, the device
    contents: str  # the contents of a page: type and scales of K/V, and whether text, draft K/V and features are kept
    layout: str  # how K/V heads are split over chips
    page_size: int  # tokens
    page_bytes: int

    def digest(self) -> bytes:
        """16 bytes, which another format of the files changes, too."""
        return blake2b(f"{FORMAT_VERSION} {self!r}".encode(), digest_size=DIGEST_BYTES).digest()


class Content(Enum):
    """What a file holds in place of the page that is looked for."""

    PAGE = auto()  # the page itself
    OTHER_TOKENS = auto()  # a page with the same digest and other tokens
    BROKEN = auto()  # no page, a damaged one, or one that belongs elsewhere


@dataclass(frozen=True, slots=True)
class PageHead:
    """What stands before the bytes of a page in its file."""

    identity: bytes  # a digest
    digest: bytes  # of the page
    tokens: bytes
    page_bytes: int

    @property
    def size(self) -> int:
        return _OF_WHAT.size + len(self.tokens) + _CHECKSUM.size

    def packed(self, page: memoryview) -> bytes:
        start = self._of_what() + self.tokens
        return start + _CHECKSUM.pack(_checksum(start, page))

    def content(self, found: bytes | bytearray, page: memoryview) -> Content:
        """What a file holds that begins with `found`, of the head's size, and goes on with `page`."""
        start, checksum = found[: -_CHECKSUM.size], found[-_CHECKSUM.size :]
        if checksum != _CHECKSUM.pack(_checksum(start, page)) or start[: _OF_WHAT.size] != self._of_what():
            return Content.BROKEN
        return Content.PAGE if start[_OF_WHAT.size :] == self.tokens else Content.OTHER_TOKENS

    def _of_what(self) -> bytes:
        assert len(self.identity) == len(self.digest) == DIGEST_BYTES
        return _OF_WHAT.pack(_MAGIC, FORMAT_VERSION, self.identity, self.digest, len(self.tokens), self.page_bytes)


def _checksum(start: bytes | bytearray, page: memoryview) -> int:
    return xxh3_64_intdigest(page, seed=xxh3_64_intdigest(start))
