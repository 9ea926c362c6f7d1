"""From stored pages to events: a router's index is the engine's own, and its hashes are those of the prompts."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from hypothesis import given, settings

from batcher.page_events import Medium, PageCopied, PageEvent, PageRemoved, PagesCleared, PageStored
from batcher.scheduling.digests import next_digest
from server.engine import kv_event_stream
from server.engine.kv_event_stream import BlockHasher, EventStream, HashAlgorithm, KvEventBatch, shown_hash
from tests.batcher.fake_runner import expected_tokens
from tests.batcher.harness import EOS, Drive, make_capacity, make_request
from tests.batcher.test_properties import Scenario, play, scenarios
from tests.examples import examples
from tests.server.support.kv_reader import Indexer, block_hashes, read_message

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
