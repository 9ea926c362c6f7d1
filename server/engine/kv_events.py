"""Publishes K/V page events over ZeroMQ in vLLM's form, for routers that send a request to the engine with its prefix.

A message has three frames: the topic, its number (from 0, 8 bytes, big-endian), and the events of a step in msgpack. A
reader that has missed messages asks the replay endpoint, with an empty frame and the number of the first. For each
message that is kept from there on it gets an empty frame and the message. The last answer has the number 2**64 - 1 and
no events.

Two threads own the sockets. One hashes, encodes and publishes; the other answers the replay requests.

The events hold the tokens of all prompts and answers. So the sockets are open to this machine only, unless they have a
key (`curve.py`) or the settings allow readers without one, as in vLLM. A reader without a key may send a bounded number
of bytes, because ZeroMQ keeps all subscriptions, and the parts of a message that does not end.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from queue import Full, Queue
from typing import Annotated, Literal

import msgspec
import zmq

from batcher.page_events import PageEvent
from server.engine.bounded_listener import BoundedListener
from server.engine.curve import Keys, as_server, limit
from server.engine.kv_event_stream import BlockHasher, EventStream, KvEventBatch

FLAG = "--kv-events-config"
END = b"\xff" * 8
REPLAY_SEND_S = 5.0  # the time in which a replay's reader must take a message
LINGER_MS = 1000  # the time at the end for messages that are not sent yet
MOST_ASKED_BYTES = 1024  # the most bytes of a frame from a reader
MOST_READER_BYTES = 1 << 14  # the most bytes from a reader without a key; then it is disconnected and connects again
OWN_ENDPOINT = "tcp://127.0.0.1:5557"  # is bound; other endpoints of this machine are readers' and are connected to
OWN_HOSTS = ("127.0.0.1", "localhost", "[::1]")
ALL_ADDRESSES = ("*", "0.0.0.0", "[::]")

_log = logging.getLogger(__name__)
_Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]


class KvEventsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of K/V events. All but the last two are vLLM's."""

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] | None = None  # None: `zmq`
    endpoint: str = OWN_ENDPOINT
    replay_endpoint: str | None = None
    buffer_steps: _Count = 10_000  # messages that are kept for the replay endpoint
    hwm: _Count = 100_000  # messages that wait for a slow reader; it misses further ones
    max_queue_size: _Count = 100_000  # steps whose events wait for their publishing; further ones are lost
    topic: str = ""
    key_file: str | None = None  # the keys of the sockets, written by `zmq.auth.create_certificates`
    show_prompts_to_network: bool = False  # allows every client that reaches the ports to read the events

    @property
    def is_on(self) -> bool:
        """Whether events are published."""
        return self.enable_kv_cache_events and self.publisher != "null"

    def endpoint_of(self, rank: int) -> str:
        """The endpoint of engine number `rank`."""
        return _of_rank(self.endpoint, rank)

    def __post_init__(self) -> None:
        for field in ("endpoint", "replay_endpoint"):
            if (endpoint := getattr(self, field)) is None:
                continue
            _check_endpoint(field, endpoint)
            is_here = endpoint.startswith("ipc://") or _host_and_port(endpoint)[0] in OWN_HOSTS
            if not (is_here or self.key_file or self.show_prompts_to_network):
                raise ValueError(
                    f"{field} {endpoint!r} shows the tokens of all prompts and answers to whoever reaches it. Give "
                    "`key_file` (written by zmq.auth.create_certificates), or `show_prompts_to_network`: true where "
                    f"only the router reaches it, or leave it on this machine (ipc://PATH, or {OWN_ENDPOINT})"
                )


class KvEventPublisher:
    """A `batcher.page_events.PageEventSink` that publishes the events. Its sockets are open from its creation.

    Args:
        rank: the number of the engine among several, which is added to the ports.

    Raises:
        ValueError: an endpoint or the key file cannot be used.
    """

    def __init__(self, config: KvEventsConfig, hasher: BlockHasher, rank: int = 0) -> None:
        self.name_of: Callable[[int], str | None] = lambda identity: None  # of adapters
        self._config = config
        self._hasher = hasher
        self._rank = rank
        self._topic = config.topic.encode()
        self._queue: Queue[list[PageEvent] | None] = Queue(config.max_queue_size)
        self._is_full = False
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)  # numbers and payloads
        self._kept_lock = threading.Lock()
        self._keys: Keys | None = None
        if config.key_file is not None:
            try:
                self._keys = Keys.read(Path(config.key_file).expanduser())
            except ValueError as error:
                raise ValueError(f"{FLAG}: key_file: {error}") from error
        self._listeners: list[BoundedListener] = []
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._threads = self._opened()
        except BaseException:
            self._context.destroy(linger=0)
            for listener in self._listeners:
                listener.close()
            raise
        for thread in self._threads:
            thread.start()

    def put(self, events: list[PageEvent]) -> bool:
        """Queues the events of a step and returns at once. Returns False if the queue is full; they are then lost."""
        try:
            self._queue.put_nowait(events)
        except Full:
            if not self._is_full:
                _log.warning(
                    "K/V events are lost: those of %d steps wait to be published. Routers believe what they have heard "
                    "until these pages are stored or removed again. More may wait: `max_queue_size` of %s",
                    self._config.max_queue_size,
                    FLAG,
                )
            self._is_full = True
            return False
        self._is_full = False
        return True

    def close(self) -> None:
        """Publishes the queued events and closes the sockets. May be called again."""
        if self._context.closed:
            return
        publishing, *replaying = self._threads
        self._queue.put(None)
        publishing.join()
        self._context.term()  # ends the other thread's wait
        for thread in replaying:
            thread.join()
        for listener in self._listeners:
            listener.close()

    def _opened(self) -> list[threading.Thread]:
        endpoint = self._config.endpoint_of(self._rank)
        socket = self._socket(zmq.PUB)
        socket.set_hwm(self._config.hwm)
        host = "" if endpoint.startswith("ipc://") else _host_and_port(endpoint)[0]
        if not host or host in ALL_ADDRESSES or self._config.endpoint == OWN_ENDPOINT:
            self._bind(socket, endpoint)
        else:  # to a reader that is bound, as with vLLM
            socket.connect(endpoint)
        threads = [threading.Thread(target=self._publish, args=(socket,), name="kv-events", daemon=True)]
        if self._config.replay_endpoint is not None:
            socket = self._socket(zmq.ROUTER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # one who is slow is waited for, and does not miss the end
            socket.setsockopt(zmq.SNDTIMEO, int(REPLAY_SEND_S * 1000))
            self._bind(socket, _of_rank(self._config.replay_endpoint, self._rank))
            threads.append(threading.Thread(target=self._replay, args=(socket,), name="kv-events-replay", daemon=True))
        return threads

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        limit(socket, MOST_ASKED_BYTES)
        if self._keys is not None:
            as_server(socket, self._keys)
        return socket

    def _bind(self, socket: zmq.Socket[bytes], endpoint: str) -> None:
        try:
            if endpoint.startswith("ipc://"):
                socket.bind(endpoint)
                return
            most_bytes = MOST_READER_BYTES if self._keys is None else None
            self._listeners.append(BoundedListener(socket, *_host_and_port(endpoint), most_bytes=most_bytes))
        except (zmq.ZMQError, OSError, OverflowError) as error:
            words = f"{getattr(error, 'strerror', error)} (addr={endpoint!r})"
            raise ValueError(f"{FLAG}: {words}. Of several engines, engine N has the port plus N") from error

    def _publish(self, socket: zmq.Socket[bytes]) -> None:
        stream = EventStream(self._hasher, lambda identity: self.name_of(identity))
        encode = msgspec.msgpack.Encoder().encode
        number = 0
        while (news := self._queue.get()) is not None:
            try:
                events = stream.translate(news)
            except Exception:
                _log.exception("%d K/V events could not be published", len(news))
                continue
            if not events:
                continue
            payload = encode(KvEventBatch(time.time(), events, self._rank))
            message = (number.to_bytes(8, "big"), payload)
            if self._config.replay_endpoint is not None:
                with self._kept_lock:
                    self._kept.append(message)
            socket.send_multipart((self._topic, *message))
            number += 1
        socket.close(linger=LINGER_MS)

    def _replay(self, socket: zmq.Socket[bytes]) -> None:
        while True:
            try:
                client, *request = socket.recv_multipart()
                if len(request) != 2 or request[0] or len(request[1]) != 8:
                    _log.debug("a request at the replay endpoint was not an empty frame and a number of 8 bytes")
                    continue
                with self._kept_lock:
                    kept = [message for message in self._kept if message[0] >= request[1]]
                for message in (*kept, (END, b"")):
                    socket.send_multipart((client, b"", self._topic, *message))
            except zmq.ContextTerminated:
                break
            except zmq.ZMQError as error:  # it has left, or reads nothing
                _log.info("a replay of K/V events has ended early: %s", error)
        socket.close(linger=0)


def _check_endpoint(field: str, endpoint: str) -> None:
    """Raises ValueError if the endpoint is neither tcp://HOST:PORT nor ipc://PATH."""
    if endpoint.startswith("ipc://") and len(endpoint) > len("ipc://"):
        return
    host, colon, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not (endpoint.startswith("tcp://") and host and colon and port.isdecimal() and 0 < int(port) < 2**16):
        raise ValueError(f"{field} {endpoint!r}: write tcp://HOST:PORT, tcp://*:PORT or ipc://PATH")


def _host_and_port(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def _of_rank(endpoint: str, rank: int) -> str:
    """The endpoint of engine number `rank`: the rank is added to the port, or `_dp` and the rank to the path."""
    if rank == 0:
        return endpoint
    if endpoint.startswith("ipc://"):
        return f"{endpoint}_dp{rank}"
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + rank}"
