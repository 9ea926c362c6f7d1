"""The hashes by which routers know pages. They are vLLM's: a hash of (parent hash, tokens, extra keys).

A router with the same seed can compute them from a prompt. The engine's prefix cache uses different digests.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from enum import StrEnum
from hashlib import sha256
from itertools import chain

Value = str | bytes | int | None | tuple["Value", ...]


class HashAlgorithm(StrEnum):
    """How a page's hash is computed, in vLLM's names."""

    SHA256_CBOR = "sha256_cbor"  # of the canonical CBOR, the same in every language
    SHA256 = "sha256"  # of Python's pickle


class BlockHasher:
    """Hashes pages. The parent of a prefix's first page is the root.

    Args:
        seed: the text from which the root is computed. None: the root is random, so no other process has the same
            hashes.
    """

    def __init__(self, algorithm: HashAlgorithm, seed: str | None) -> None:
        self._digest = _pickle_digest if algorithm is HashAlgorithm.SHA256 else _CborDigest()
        self.root = os.urandom(32) if seed is None else self._digest(seed)

    def hash_of(self, parent: bytes | None, tokens: Sequence[int], extra: tuple[str, ...] | None) -> bytes:
        """The hash of a page.

        Args:
            parent: the hash of the page before it; None: it is the first page.
            tokens: the token ids of the page.
            extra: further keys on which its K/V depend, such as the name of a LoRA adapter.
        """
        return self._digest((self.root if parent is None else parent, tuple(tokens), extra))


def shown_hash(digest: bytes) -> int:
    """The last 64 bits of a hash, which events carry."""
    return int.from_bytes(digest[-8:], "big")


def _pickle_digest(value: Value) -> bytes:
    return sha256(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)).digest()


class _CborDigest:
    """SHA-256 of the canonical CBOR of a value (RFC 8949, section 4.2). Each token is encoded once and kept."""

    def __init__(self) -> None:
        self._numbers = _Numbers()

    def __call__(self, value: Value) -> bytes:
        return sha256(b"".join(self._parts(value))).digest()

    def _parts(self, value: Value) -> Sequence[bytes]:
        match value:
            case None:
                return (b"\xf6",)
            case int():
                return (self._numbers[value],)
            case bytes():
                return (_head(2, len(value)), value)
            case str():
                text = value.encode()
                return (_head(3, len(text)), text)
            case (int(), *_):  # tokens, by the thousand
                return (_head(4, len(value)), *map(self._numbers.__getitem__, value))  # type: ignore[arg-type]
            case _:
                return (_head(4, len(value)), *chain.from_iterable(map(self._parts, value)))


class _Numbers(dict[int, bytes]):
    """The CBOR encodings of whole numbers from 0, made on first use."""

    def __missing__(self, number: int) -> bytes:
        self[number] = encoded = _head(0, number)
        return encoded


def _head(major: int, count: int) -> bytes:
    """The first bytes of a CBOR item: its major type, and a number in as few bytes as possible."""
    if count < 24:
        return bytes([major << 5 | count])
    size = next(size for size in (1, 2, 4, 8) if count < 1 << 8 * size)
    return bytes([major << 5 | 23 + size.bit_length()]) + count.to_bytes(size, "big")
