"""A router's view of the demo's prefix cache, over TCP: pages are stored, evicted and cleared."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from itertools import count

import pytest

from server.engine.kv_event_stream import shown_hash
from tests.conftest import COMPILED
from tests.e2e.conftest import ADMIN_KEY, DemoServer, serve
from tests.server.engine.hosts.loopback import free_port
from tests.server.support.kv_reader import Indexer, Message, Reader, block_hashes, replay

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SIZE, NUM_PAGES = 16, 8
SMALL = ["--max-num-seqs=2", "--max-num-batched-tokens=16", "--max-model-len=64"]
SMALL += [f"--page-size={SIZE}", f"--num-pages={NUM_PAGES}", "--compile-all-first"]
LORA = ["--enable-lora", "--max-loras=1", "--lora-modules", "pirate=model/demo/adapters/pirate"]
SEED = {"PYTHONHASHSEED": "42"}
TOPIC = "kv@10.1.2.3:8000@demo"


def flags(port: int, **fields: object) -> list[str]:
    config = {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{port}", "topic": TOPIC} | fields
    config |= {"show_prompts_to_network": True}
    return ["--kv-events-config", json.dumps(config), "--prefix-caching-hash-algo", "sha256_cbor"]


@pytest.fixture(scope="module")
def ports() -> tuple[int, int]:
    port = free_port()
    return port, port + 1


@pytest.fixture(scope="module")
def server(ports) -> Iterator[DemoServer]:
    events = flags(ports[0], replay_endpoint=f"tcp://*:{ports[1]}")
    kept = ("--compile-cache", str(COMPILED))
    with serve(*SMALL, *LORA, *kept, *events, "--admin-api-key", ADMIN_KEY, env=os.environ | SEED) as server:
        yield server
    assert server.process.returncode == 0


class Router:
    """Follows an engine from its first message on."""

    def __init__(self, port: int, replay_port: int) -> None:
        self.reader = Reader(f"tcp://127.0.0.1:{port}", "kv@")
        self.index = Indexer()
        self.messages: list[Message] = []
        self._replay = f"tcp://127.0.0.1:{replay_port}"

    def follow(self, holds: Callable[[Indexer], bool]) -> None:
        """Reads until the index is as it must be. What came before the subscription is asked for."""
        while not holds(self.index):
            message = self.reader.next()
            if message.number > len(self.messages):
                for missed in replay(self._replay, len(self.messages))[: message.number - len(self.messages)]:
                    self._take(missed)
            self._take(message)

    def _take(self, message: Message) -> None:
        assert message.number == len(self.messages)
        self.messages.append(message)
        self.index.take(message)


def ask(server: DemoServer, prompt: list[int], model: str = "demo") -> None:
    body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    with server.http() as http:
        assert http.post("/v1/completions", json=body).status_code == 200


def hashes(prompt: list[int], lora_name: str | None = None) -> list[int]:
    return [shown_hash(block) for block in block_hashes(prompt, SIZE, seed=SEED["PYTHONHASHSEED"], lora_name=lora_name)]


@pytest.fixture
def router(server, ports) -> Iterator[Router]:
    router = Router(*ports)
    yield router
    router.reader.close()


def test_a_router_knows_what_the_engine_has(server, router):
    prompts = ([number] * 50 for number in count(300))
    first = next(prompts)
    ask(server, first)
    while not router.reader.socket.poll(20):  # until the subscription has arrived
        ask(server, next(prompts))
    router.follow(lambda index: index.prefixes.keys() >= set(hashes(first)))
    assert {message.topic for message in router.messages} == {TOPIC}
    assert router.index.prefixes[hashes(first)[-1]] == (None, *first[:48])

    for prompt, model in ((next(prompts), "demo"), (next(prompts), "pirate"), (next(prompts), "demo")):
        ask(server, prompt, model)
        wanted = set(hashes(prompt, "pirate" if model == "pirate" else None))
        router.follow(lambda index, wanted=wanted: wanted <= index.blocks["GPU"])
        assert len(router.index.blocks["GPU"]) <= NUM_PAGES
    assert router.index.seen["BlockRemoved"] > 0
    of_pirate = [event for m in router.messages for event in m.events if event.get("lora_name") == "pirate"]
    assert all(event["lora_id"] == 1 for event in of_pirate)
    assert [key for event in of_pirate for key in event["extra_keys"]] == [["pirate"]] * 3

    with server.http(headers={"Authorization": f"Bearer {ADMIN_KEY}"}) as http:
        assert http.post("/reset_prefix_cache").status_code == 200
    router.follow(lambda index: index.seen["AllBlocksCleared"] == 1)
    assert router.index.blocks == {"GPU": set(), "CPU": set()}
    ask(server, first)
    router.follow(lambda index: index.blocks["GPU"] == set(hashes(first)))
    metrics = server.wait_for_metrics(lambda metrics: metrics["kv_events_published_total"] > 0)
    assert metrics["kv_events_dropped_total"] == 0
