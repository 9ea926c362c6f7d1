"""From stored pages to events: a router's index is the engine's own, and its hashes are those of the prompts."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batcher.page_events import Medium, PageCopied, PageEvent, PageRemoved, PagesCleared, PageStored
from batcher.scheduling.digests import next_digest
from server.engine import kv_event_stream
from server.engine.kv_event_stream import BlockHasher, EventStream, HashAlgorithm, KvEventBatch, _CborDigest, shown_hash
from tests.batcher.fake_runner import expected_tokens
from tests.batcher.harness import EOS, Drive, make_capacity, make_request
from tests.batcher.test_properties import Scenario, play, scenarios
from tests.examples import examples
from tests.server.support.kv_reader import Indexer, block_hashes, cbor, read_message

SEED = "0"
SIZE = 4


class Router:
    """Reads at once what the engine says."""

    def __init__(self, name_of: Any = hex) -> None:
        self.stream = EventStream(BlockHasher(HashAlgorithm.SHA256_CBOR, SEED), name_of)
        self.index = Indexer()
        self.events: list[dict[str, Any]] = []

    def put(self, events: list[PageEvent]) -> bool:
        payload = msgspec.msgpack.encode(KvEventBatch(1.5, self.stream.translate(events), 0))
        message = read_message([b"", bytes(8), payload])
        self.index.take(message)
        self.events += message.events
        return True

    def close(self) -> None:
        pass


def page(digest: bytes, parent: bytes | None, *tokens: int, salt: int = 0, adapter: int = 0) -> PageStored:
    return PageStored(digest, parent, np.array(tokens, np.int32).tobytes(), salt, adapter)


def hashes(*tokens: int, **keys: Any) -> list[int]:
    return [shown_hash(block) for block in block_hashes(list(tokens), SIZE, seed=SEED, **keys)]


@settings(max_examples=examples(60))
@given(scenarios())
def test_the_routers_index_is_the_engines(scenario: Scenario) -> None:
    router = Router()
    drive = play(scenario, scenario.drive(router))
    size = drive.capacity.page_size
    known: dict[bytes, int] = {}  # the hash of each page that any request can have had, by the engine's digest
    for request in drive.requests.values():
        tokens = [*request.prompt, *expected_tokens(request, drive.capacity, EOS)]
        digests: list[bytes] = []
        of_pages = block_hashes(
            tokens,
            size,
            seed=SEED,
            lora_name=hex(request.adapter) if request.adapter else None,
            salt=f"{request.cache_salt:x}" if request.cache_salt else None,
        )
        for number, block in enumerate(of_pages):
            content = np.array(tokens[number * size : (number + 1) * size], np.int32).tobytes()
            digests.append(next_digest(request, digests, content))
            known[digests[-1]] = shown_hash(block)
    assert router.index.blocks == {"GPU": {known[digest] for digest in drive.scheduler.pool._index}, "CPU": set()}


def test_a_router_finds_the_prefix_that_the_engine_finds():
    router = Router()
    drive = Drive(make_capacity(page_size=SIZE, max_loras=1), page_events=router)
    prompt = list(range(10, 23))
    drive.add(make_request("a", prompt, max_tokens=1, adapter=7))
    drive.finish()
    (event,) = router.events
    assert event["lora_name"] == "0x7" and event["lora_id"] == 1 and event["parent_block_hash"] is None
    assert event["token_ids"] == prompt[:12] and event["extra_keys"] == [["0x7"]] * 3
    assert event["block_hashes"] == hashes(*prompt, lora_name="0x7")
    drive.add(make_request("b", prompt, max_tokens=1))
    drive.finish()
    assert router.events[1]["block_hashes"] == hashes(*prompt) and router.events[1]["extra_keys"] == [None] * 3
    assert router.events[1]["lora_id"] is router.events[1]["lora_name"] is None


def test_a_salt_is_a_key_of_the_first_page_only():
    router = Router()
    router.put([page(b"a", None, 1, 2, 3, 4, salt=0x5EED), page(b"b", b"a", 5, 6, 7, 8, salt=0x5EED)])
    assert router.events[0]["extra_keys"] == [["5eed"], None]
    assert router.events[0]["block_hashes"] == hashes(1, 2, 3, 4, 5, 6, 7, 8, salt="5eed")


def test_pages_of_other_prefixes_are_events_of_their_own():
    router = Router()
    router.put([page(b"a", None, 1, 2, 3, 4), page(b"b", None, 5, 6, 7, 8), page(b"c", b"a", 9, 9, 9, 9)])
    assert [event["parent_block_hash"] for event in router.events] == [None, None, hashes(1, 2, 3, 4)[0]]


def test_an_adapter_that_was_loaded_again_under_its_name_has_the_same_hashes_once():
    """The engine keeps their pages apart, and a router cannot: it hears of both as of one."""
    router = Router(name_of=lambda identity: "pirate")
    router.put([page(b"a", None, 1, 2, 3, 4, adapter=1)])
    router.put([page(b"b", None, 1, 2, 3, 4, adapter=2)])
    router.put([PageRemoved(b"a", Medium.DEVICE)])
    assert router.index.blocks["GPU"] == set(hashes(1, 2, 3, 4, lora_name="pirate"))
    router.put([PageRemoved(b"b", Medium.DEVICE)])
    assert router.index.blocks["GPU"] == set() and len(router.events) == 2


def test_an_adapter_without_a_name_has_its_identity():
    router = Router(name_of=lambda identity: None)
    router.put([page(b"a", None, 1, 2, 3, 4, adapter=0xABC)])
    assert router.events[0]["lora_name"] == "abc"


def test_media_are_told_apart():
    router = Router()
    router.put([page(b"a", None, 1, 2, 3, 4), page(b"b", b"a", 5, 6, 7, 8)])
    router.put([PageCopied(b"a", Medium.HOST), PageCopied(b"b", Medium.HOST), PageCopied(b"unknown", Medium.HOST)])
    first, second = hashes(1, 2, 3, 4, 5, 6, 7, 8)
    assert router.index.blocks == {"GPU": {first, second}, "CPU": {first, second}}
    router.put([PageRemoved(b"a", Medium.DEVICE), PageRemoved(b"b", Medium.HOST)])
    assert router.index.blocks == {"GPU": {second}, "CPU": {first}}
    router.put([PagesCleared(Medium.DEVICE)])  # the host's memory keeps its pages
    assert router.index.blocks == {"GPU": set(), "CPU": {first}}
    router.put([page(b"c", b"a", 5, 5, 5, 5), PagesCleared(Medium.HOST), PagesCleared(Medium.DEVICE)])
    assert router.index.blocks == {"GPU": set(), "CPU": set()} and router.index.seen["AllBlocksCleared"] == 1


def test_after_lost_events_a_router_hears_of_what_has_a_known_prefix():
    router = Router()
    router.put([page(b"a", None, 1, 2, 3, 4)])
    router.put([page(b"d", b"lost", 7, 7, 7, 7), PageRemoved(b"lost", Medium.DEVICE)])
    assert len(router.events) == 1
    router.put([page(b"a", None, 1, 2, 3, 4)])  # its removal was lost
    router.put([page(b"b", b"a", 5, 6, 7, 8)])
    assert router.index.blocks["GPU"] == set(hashes(1, 2, 3, 4, 5, 6, 7, 8))


def test_a_page_after_one_that_is_gone_is_known_for_a_while(monkeypatch):
    monkeypatch.setattr(kv_event_stream, "KEPT_HASHES", 2)
    router = Router()
    roots = [page(bytes([number]), None, number, 0, 0, 0) for number in range(3)]
    router.put([*roots, PagesCleared(Medium.DEVICE)])
    router.put([page(b"after 0", roots[0].digest, 1, 1, 1, 1), page(b"after 2", roots[2].digest, 1, 1, 1, 1)])
    assert len(router.index.blocks["GPU"]) == 1
    assert len(router.stream._hashes) == 3


# Of the root with the seed "42", and of pages: three of one prefix, two of an adapter and a salt, one of a long key.
VECTORS = {
    HashAlgorithm.SHA256_CBOR: (
        "9fa6eb003f14425eb9c8e6baacfbcaab26257357b829c7bfa74ffcc4f31c1780",
        "5accc84e2fa78c84d428cf8bee397cb0dfb391e047560b81b149bc8f6837bd68",
        "b5850bdc2b486c2623bc9d20b6d6fa721a00c2b34268da414619edbcd7b40749",
        "b869b18013cd8af39924117e752ab8a81bcc5dcd91971b8477916167945904d3",
        "b586abf40fa6b2dc0b09431af00588aa35b3a6f94cfaba2616e6c258c053963d",
        "d461b838bee3a76f4e997d47530d7a9b6e40d9a59c5424003a8ecb5a904365f6",
        "8f02de82678938022d9aaf06a5b6d1442e4f1fc0c430d7522071a098ec514f45",
    ),
    HashAlgorithm.SHA256: (
        "c0bc02c9fc92a4944335649961b9e55cc41b194bece4801e8c6ef0f0f3f5884a",
        "7f02c0bf53425e6792bde7680318b665a15eb105e1b916d078d65b11e03fbc88",
        "fb850e5861b8e9dc94f0100beb25b4b56ba836a693976ed8006dbc4e65375f82",
        "c20c06f11286c5c4083f59ae7f469e08412083c729ea13c1dbce9be94cebd1aa",
        "88d9b34e85845674cd5a0b5d73898b2c4329e6ab80d0b16d012878ec5e50086e",
        "e49a1d6ee8b229fbd8218191bfeb58df3e4f820d63460324dc78f809a92ccb6c",
        "64ba03a7b1fb89248e1eb9197f78672b64a56bd98a3328f95dbf5023b5f7ff5b",
    ),
}


@pytest.mark.parametrize("algorithm", HashAlgorithm)
def test_hashes_are_vllms(algorithm):
    root, first, second, third, salted, after_it, long = VECTORS[algorithm]
    hasher = BlockHasher(algorithm, "42")
    hash_of = hasher.hash_of
    assert hasher.root.hex() == root
    assert hash_of(None, [0, 1, 23, 24], None).hex() == first
    assert hash_of(bytes.fromhex(first), [255, 256, 65535, 65536], None).hex() == second
    assert hash_of(bytes.fromhex(second), [128255, 2**31 - 1, 7, 7], None).hex() == third
    assert hash_of(None, [1, 2, 3, 4], ("pirate", "5eed")).hex() == salted
    assert hash_of(bytes.fromhex(salted), [5, 6, 7, 8], ("pirate",)).hex() == after_it
    assert hash_of(None, [1, 2, 3, 4], ("é" * 30,)).hex() == long


def test_events_have_the_last_64_bits():
    assert shown_hash(bytes.fromhex(VECTORS[HashAlgorithm.SHA256_CBOR][1])) == 0xB149BC8F6837BD68


def test_without_a_seed_every_engine_has_hashes_of_its_own():
    assert BlockHasher(HashAlgorithm.SHA256_CBOR, None).root != BlockHasher(HashAlgorithm.SHA256_CBOR, None).root


values = st.recursive(
    st.none() | st.integers(0, 2**64 - 1) | st.binary(max_size=300) | st.text(max_size=300),
    lambda inner: st.lists(inner, max_size=30).map(tuple).filter(lambda item: not (item and isinstance(item[0], int))),
)


@given(values | st.lists(st.integers(0, 2**32), max_size=300).map(tuple))
def test_cbor_is_canonical(value):
    assert b"".join(_CborDigest()._parts(value)) == cbor(value)
