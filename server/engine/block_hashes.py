"""The hashes of pages that routers know: vLLM's, of (the hash before, the tokens, extra keys), each from the last.

A router can compute them from a prompt, if it has the same seed. The engine's own prefix cache has digests of its own.
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
    """Hashes pages. The first page of a prefix follows from the root.

    Args:
        seed: the hash of the root follows from it. None: the root is random, so no other process has the same hashes.
    """

    def __init__(self, algorithm: HashAlgorithm, seed: str | None) -> None:
        self._digest = _pickle_digest if algorithm is HashAlgorithm.SHA256 else _CborDigest()
        self.root = os.urandom(32) if seed is None else self._digest(seed)

    def hash_of(self, parent: bytes | None, tokens: Sequence[int], extra: tuple[str, ...] | None) -> bytes:
        """The hash of a page.

        Args:
            parent: the hash of the page before it; None: it is the first.
            extra: what else its K/V depend on, such as the name of a LoRA adapter.
        """
        return self._digest((self.root if parent is None else parent, tuple(tokens), extra))


def shown_hash(digest: bytes) -> int:
    """A hash as events have it: its last 64 bits."""
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
    """The CBOR of whole numbers from 0."""

    def __missing__(self, number: int) -> bytes:
        self[number] = encoded = _head(0, number)
        return encoded


def _head(major: int, count: int) -> bytes:
    """The first bytes of an item of CBOR: its type, and a number in as few bytes as hold it."""
    if count < 24:
        return bytes([major << 5 | count])
    size = next(size for size in (1, 2, 4, 8) if count < 1 << 8 * size)
    return bytes([major << 5 | 23 + size.bit_length()]) + count.to_bytes(size, "big")
