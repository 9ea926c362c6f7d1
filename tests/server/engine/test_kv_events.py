"""The publisher of K/V events, over TCP."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
import zmq.auth

from batcher.page_events import Medium, PageEvent, PageRemoved, PageStored
from server.engine.curve import Keys
from server.engine.kv_event_stream import BlockHasher, HashAlgorithm
from server.engine.kv_events import KvEventPublisher, KvEventsConfig
from tests.server.engine.hosts.loopback import free_port
from tests.server.support.kv_reader import Message, Reader, replay
from tests.server.support.zmtp import MOST_FLOODED, connected, flood, frame, is_refused, sent

HASHER = BlockHasher(HashAlgorithm.SHA256_CBOR, "0")
TOPIC = "kv@10.0.0.1:8000@demo"


class Endpoints:
    def __init__(self) -> None:
        self.port = free_port()  # and the next one
        self.bound, self.replay_bound = f"tcp://*:{self.port}", f"tcp://*:{self.port + 1}"
        self.live, self.replay = f"tcp://127.0.0.1:{self.port}", f"tcp://127.0.0.1:{self.port + 1}"


@contextmanager
def publishing(hasher: BlockHasher = HASHER, **changes: Any) -> Iterator[tuple[KvEventPublisher, Endpoints]]:
    """A publisher on ports that were free a moment ago; if another process has taken one, on others."""
    for attempt in count():
        endpoints = Endpoints()
        fields = {"endpoint": endpoints.bound, "replay_endpoint": endpoints.replay_bound, "topic": TOPIC}
        fields |= {"show_prompts_to_network": True}
        try:
            publisher = KvEventPublisher(KvEventsConfig(enable_kv_cache_events=True, **fields | changes), hasher)
            break
        except ValueError:
            if attempt == 10:
                raise
    try:
        yield publisher, endpoints
    finally:
        publisher.close()
        publisher.close()  # a second time


def stored(number: int) -> list[PageEvent]:
    """A page whose first token says which one it is."""
    return [PageStored(number.to_bytes(8), None, np.array([number, 0], np.int32).tobytes(), 0, 0)]


def told(messages: list[Message]) -> list[int]:
    return [event["token_ids"][0] for message in messages for event in message.events]


def put_until_heard(publisher: KvEventPublisher, reader: Reader, numbers: Iterator[int]) -> Message:
    """A subscription takes a moment to arrive. The first message that comes."""
    for number in numbers:
        assert publisher.put(stored(number))
        if reader.socket.poll(20):
            return reader.next()
    raise AssertionError("unreachable")


@pytest.fixture
def read() -> Iterator[Callable[..., Reader]]:
    readers: list[Reader] = []

    def make(*args: Any, **options: Any) -> Reader:
        readers.append(Reader(*args, **options))
        return readers[-1]

    yield make
    for reader in readers:
        reader.close()


def test_messages_come_in_order_and_missed_ones_by_replay(read):
    numbers = count()
    with publishing() as (publisher, endpoints):
        reader = read(endpoints.live, "kv@")
        first = put_until_heard(publisher, reader, numbers)
        last = next(numbers) + 3
        for number in range(last - 3, last + 1):
            publisher.put(stored(number))
        live = [first]
        while told(live)[-1] < last:
            live.append(reader.next())
        assert [message.number for message in live] == told(live) == list(range(first.number, last + 1))
        assert {(message.topic, message.rank) for message in live} == {(TOPIC, 0)}
        for start in (0, 2, last, last + 1):
            again = replay(endpoints.replay, start)
            assert told(again) == [message.number for message in again] == list(range(start, last + 1))
        assert again == [] and replay(endpoints.replay, first.number) == live


def test_a_reader_of_another_topic_hears_nothing(read):
    numbers = count()
    with publishing() as (publisher, endpoints):
        other, reader = read(endpoints.live, "kv@10.0.0.2"), read(endpoints.live, "kv@10.0.0.1")
        put_until_heard(publisher, reader, numbers)
        assert not other.socket.poll(0)


def test_the_newest_messages_are_kept_for_replay():
    with publishing(buffer_steps=3) as (publisher, endpoints):
        for number in range(5):
            publisher.put(stored(number))
        while (kept := told(replay(endpoints.replay, 0)))[-1:] != [4]:
            pass
        assert kept == [2, 3, 4]


def test_a_step_of_which_there_is_nothing_to_tell_has_no_number():
    with publishing() as (publisher, endpoints):
        publisher.put([PageRemoved(b"never stored", Medium.DEVICE)])
        publisher.put(stored(7))
        while not (messages := replay(endpoints.replay, 0)):
            pass
    assert [message.number for message in messages] == [0] and told(messages) == [7]


def test_a_request_that_means_nothing_is_not_answered_and_the_next_one_is():
    with publishing() as (publisher, endpoints), zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(endpoints.replay)
        for frames in ((b"",), (b"", b"three"), (b"no", bytes(8)), (b"", bytes(8), b"")):
            socket.send_multipart(frames)
        publisher.put(stored(0))
        while not replay(endpoints.replay, 0):
            pass
        socket.send_multipart((b"", (1).to_bytes(8, "big")))
        assert socket.poll(30_000) and socket.recv_multipart() == [b"", TOPIC.encode(), b"\xff" * 8, b""]


def test_a_reader_that_is_killed_stops_nobody(read):
    numbers = count()
    with publishing(hwm=1) as (publisher, endpoints):
        killed = read(endpoints.live)
        put_until_heard(publisher, killed, numbers)
        killed.close()
        for number in (next(numbers) for _ in range(100)):
            assert publisher.put(stored(number))
        reader = read(endpoints.live)
        put_until_heard(publisher, reader, numbers)
        # One who asks for what was kept, and leaves.
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(endpoints.replay)
            socket.send_multipart((b"", bytes(8)))
        last = next(numbers)
        publisher.put(stored(last))
        while told(replay(endpoints.replay, last)) != [last]:
            pass


def test_beyond_the_queue_events_are_lost_with_one_warning(caplog):
    class Slow(BlockHasher):
        begun, may_end = threading.Event(), threading.Event()

        def hash_of(self, *args: Any) -> bytes:
            self.begun.set()
            assert self.may_end.wait(30)
            return super().hash_of(*args)

    hasher = Slow(HashAlgorithm.SHA256_CBOR, "0")
    with publishing(hasher, max_queue_size=2) as (publisher, endpoints):
        assert publisher.put(stored(0))
        assert hasher.begun.wait(30)
        assert [publisher.put(stored(number)) for number in range(1, 5)] == [True, True, False, False]
        hasher.may_end.set()
        while told(replay(endpoints.replay, 0)) != [0, 1, 2]:
            pass
        assert publisher.put(stored(5))
    (warning,) = caplog.messages
    assert "`max_queue_size` of --kv-events-config" in warning and "those of 2 steps wait" in warning


def test_what_waits_is_published_before_the_end(read):
    numbers = count()
    reader = read("tcp://127.0.0.1:*", binds=True)  # the reader's socket is bound, and engines connect
    address = reader.socket.get_string(zmq.LAST_ENDPOINT)
    with publishing(endpoint=address, replay_endpoint=None) as (publisher, _):
        first = put_until_heard(publisher, reader, numbers)
        last = next(numbers)
        publisher.put(stored(last))
        heard = [first]
        while told(heard)[-1] != last:
            heard.append(reader.next())
    assert told(heard) == list(range(first.number, last + 1))


@pytest.mark.parametrize("field", ["endpoint", "replay_endpoint"])
def test_a_port_in_use_is_refused_by_name(field, tmp_path):
    free = f"ipc://{tmp_path}/kv"
    with publishing(replay_endpoint=None) as (_, taken):
        config = KvEventsConfig(**{"endpoint": free} | {field: taken.bound}, show_prompts_to_network=True)
        words = re.escape(f"--kv-events-config: Address already in use (addr='{taken.bound}')")
        with pytest.raises(ValueError, match=words):
            KvEventPublisher(config, HASHER)
        KvEventPublisher(KvEventsConfig(endpoint=free), HASHER).close()  # the refused one has closed what it had


def test_each_of_several_engines_has_ports_of_its_own(read, tmp_path):
    config = KvEventsConfig(endpoint="tcp://*:5557", show_prompts_to_network=True)
    assert [config.endpoint_of(rank) for rank in range(3)] == ["tcp://*:5557", "tcp://*:5558", "tcp://*:5559"]
    assert KvEventsConfig(endpoint="ipc:///run/kv").endpoint_of(2) == "ipc:///run/kv_dp2"
    endpoint = f"ipc://{tmp_path}/kv"
    publisher = KvEventPublisher(KvEventsConfig(endpoint=endpoint), HASHER, rank=1)
    assert put_until_heard(publisher, read(f"{endpoint}_dp1"), count()).rank == 1
    publisher.close()


def certificate(folder: Path) -> tuple[str, Keys]:
    """A file of keys, and its keys."""
    _, secret = zmq.auth.create_certificates(folder, "events")
    return secret, Keys.read(Path(secret))


def test_with_a_key_file_readers_must_know_the_key(read, tmp_path):
    numbers = count()
    secret, keys = certificate(tmp_path)
    own = {"key_file": secret, "show_prompts_to_network": False}
    with publishing(**own) as (publisher, endpoints):
        stranger, reader = read(endpoints.live), read(endpoints.live, server=keys.public)
        put_until_heard(publisher, reader, numbers)
        last = next(numbers)
        publisher.put(stored(last))
        while told(replay(endpoints.replay, last, server=keys.public)) != [last]:
            pass
        assert not stranger.socket.poll(0)


def test_a_file_without_keys_is_refused_by_name(tmp_path):
    public, _ = zmq.auth.create_certificates(tmp_path, "events")
    for file, words in ((public, "has no secret key"), (tmp_path / "none", "cannot be read")):
        with pytest.raises(ValueError, match=f"--kv-events-config: key_file: .*{words}"):
            KvEventPublisher(KvEventsConfig(key_file=str(file)), HASHER)


@pytest.mark.parametrize("has_key", [False, True])
@pytest.mark.parametrize(("offset", "kind"), [(0, b"SUB"), (1, b"DEALER")], ids=["PUB", "replay"])
def test_a_message_without_an_end_is_cut(read, tmp_path, has_key, offset, kind):
    """Of 32 MiB in frames of one byte, little more than the system's own buffers is accepted. Readers go on."""
    secret, keys = certificate(tmp_path)
    own = {"key_file": secret} if has_key else {}
    with publishing(**own) as (publisher, endpoints):
        assert flood(endpoints.port + offset, kind) < MOST_FLOODED
        assert is_refused(endpoints.port + offset, kind, 2**33)
        put_until_heard(publisher, read(endpoints.live, server=keys.public if has_key else None), count())


def test_a_reader_without_a_key_has_no_subscriptions_without_end(read):
    """ZeroMQ keeps each of them."""
    with publishing() as (publisher, endpoints), connected(endpoints.port, b"SUB") as stranger:
        accepted = sent(stranger, (frame(b"\1" + b"%d" % number) for number in range(2**21)))
        assert accepted < MOST_FLOODED
        put_until_heard(publisher, read(endpoints.live), count())
