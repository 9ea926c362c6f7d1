"""Translates the batcher's page events to the events that routers read, in the form of vLLM 0.26.

A batch is an array of its time, its events, and the engine's number. An event is a map with its type and its fields.
Pages of one prefix that were stored one after the other become one event.

The hashes by which routers know pages are vLLM's, too: a hash of (parent hash, tokens, extra keys). A router with the
same seed can compute them from a prompt. The engine's prefix cache uses different digests.
"""

from __future__ import annotations

import os
import pickle
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from hashlib import sha256
from itertools import chain

import msgspec

from batcher.page_events import Medium, PageCopied, PageEvent, PageRemoved, PagesCleared, PageStored

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


KEPT_HASHES = 2**14  # of pages that are gone: a page after one of them may be stored soon


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Pages were stored in a medium. For a medium other than the device the event has their hashes only."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None  # one entry for each page
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Pages were removed from a medium."""

    block_hashes: list[int]
    medium: str
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, gc=False):
    """All pages were removed from all media."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KvEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The events of a step."""

    ts: float  # seconds since 1970
    events: list[KvEvent]
    data_parallel_rank: int | None = None


class EventStream:
    """Translates events in their order. Not thread-safe.

    A page with an unknown parent is left out, because the event of the parent has been lost.

    Args:
        name_of: returns the name of the adapter or model with this identity; None: it no longer has one.
    """

    def __init__(self, hasher: BlockHasher, name_of: Callable[[int], str | None]) -> None:
        self._hasher = hasher
        self._name_of = name_of
        self._hashes: dict[bytes, bytes] = {}  # by digest, of all pages in `_held` and `_gone`
        self._held: dict[Medium, dict[bytes, None]] = {medium: {} for medium in Medium}  # digests, the oldest first
        self._copies = {medium: Counter[int]() for medium in Medium}  # pages in `_held` of each hash
        self._gone: OrderedDict[bytes, None] = OrderedDict()  # digests of pages in no medium, the oldest first
        self._lora_ids: dict[int, int] = {}  # by identity: numbers from 1
        self._page_size = 0

    def translate(self, news: Iterable[PageEvent]) -> list[KvEvent]:
        """The routers' events for these page events; it may be none."""
        events: list[KvEvent] = []
        last: PageStored | None = None  # the page that `events` ends with
        for item in news:
            match item:
                case PageStored():
                    is_next = last is not None and last.digest == item.parent and last.adapter == item.adapter
                    last = item if self._store(item, events, is_next=is_next) else None
                    continue
                case PageCopied(digest=digest, medium=medium):
                    self._copy(digest, medium, events)
                case PageRemoved(digest=digest, medium=medium):
                    self._remove(digest, medium, events)
                case PagesCleared(medium=medium):
                    self._clear(medium, events)
            last = None
        return events

    def _store(self, page: PageStored, events: list[KvEvent], *, is_next: bool) -> bool:
        """Adds a stored page to `events`. Returns whether `events` ends with it."""
        parent = None if page.parent is None else self._hashes.get(page.parent)
        if parent is None and page.parent is not None:
            return False
        tokens = array("i", page.tokens).tolist()
        names = {weights: self._name_of(weights) or f"{weights:x}" for weights in (page.model, page.adapter) if weights}
        name = names.get(page.adapter)
        salt = [f"{page.salt:x}"] if page.salt and parent is None else []
        extra = (*names.values(), *salt) or None
        hashed = self._hashes.get(page.digest) or self._hasher.hash_of(parent, tokens, extra)
        self._page_size = len(tokens)
        if not self._hold(page.digest, hashed, Medium.DEVICE):
            return False
        shown = shown_hash(hashed)
        if is_next and isinstance(event := events[-1], BlockStored) and event.extra_keys is not None:
            event.block_hashes.append(shown)
            event.token_ids += tokens
            event.extra_keys.append(extra)
            return True
        lora_id = self._lora_ids.setdefault(page.adapter, len(self._lora_ids) + 1) if page.adapter else None
        events.append(
            BlockStored(
                block_hashes=[shown],
                parent_block_hash=None if parent is None else shown_hash(parent),
                token_ids=tokens,
                block_size=len(tokens),
                lora_id=lora_id,
                medium=Medium.DEVICE.value,
                lora_name=name,
                extra_keys=[extra],
                group_idx=0,
                kv_cache_spec_kind="full_attention",
            )
        )
        return True

    def _copy(self, digest: bytes, medium: Medium, events: list[KvEvent]) -> None:
        hashed = self._hashes.get(digest)
        if hashed is None or not self._hold(digest, hashed, medium):
            return
        events.append(
            BlockStored(
                block_hashes=[shown_hash(hashed)],
                parent_block_hash=None,
                token_ids=[],
                block_size=self._page_size,
                lora_id=None,
                medium=medium.value,
                lora_name=None,
                group_idx=0,
                kv_cache_spec_kind="full_attention",
            )
        )

    def _remove(self, digest: bytes, medium: Medium, events: list[KvEvent]) -> None:
        if digest not in self._held[medium]:
            return
        del self._held[medium][digest]
        shown, copies = shown_hash(self._hashes[digest]), self._copies[medium]
        copies[shown] -= 1
        self._forget_later(digest)
        if copies[shown]:  # two digests have this hash: an adapter was loaded again under its name
            return
        del copies[shown]
        if events and isinstance(last := events[-1], BlockRemoved) and last.medium == medium:
            last.block_hashes.append(shown)
        else:
            events.append(BlockRemoved(block_hashes=[shown], medium=medium.value, group_idx=0))

    def _clear(self, medium: Medium, events: list[KvEvent]) -> None:
        shown = list(self._copies[medium])
        held, self._held[medium] = self._held[medium], {}
        self._copies[medium].clear()
        for digest in held:
            self._forget_later(digest)
        if not any(self._held.values()):
            events.append(AllBlocksCleared())
        elif shown:  # the event for all would clear the other media, too
            events.append(BlockRemoved(block_hashes=shown, medium=medium.value, group_idx=0))

    def _hold(self, digest: bytes, hashed: bytes, medium: Medium) -> bool:
        """Adds a page to a medium. Returns whether routers need an event for it."""
        if digest in self._held[medium]:  # the event of its removal has been lost
            return False
        self._gone.pop(digest, None)
        self._hashes[digest] = hashed
        self._held[medium][digest] = None
        shown = shown_hash(hashed)
        self._copies[medium][shown] += 1
        return self._copies[medium][shown] == 1

    def _forget_later(self, digest: bytes) -> None:
        if any(digest in held for held in self._held.values()):
            return
        self._gone[digest] = None
        if len(self._gone) > KEPT_HASHES:
            del self._hashes[self._gone.popitem(last=False)[0]]
