"""A router's side of K/V events: reads messages by llm-d's schema, and keeps an index of them as llm-d does."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import msgspec
import zmq

from server.engine.curve import Keys, as_client

# In llm-d's order. Those before `lora_id` must be there.
STORED = (
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
    "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window",
)  # fmt: skip
REMOVED = ("block_hashes", "medium", "group_idx")
FIELDS = {"BlockStored": STORED, "BlockRemoved": REMOVED, "AllBlocksCleared": ()}


@dataclass(frozen=True)
class Message:
    topic: str
    number: int
    time: float
    events: list[dict[str, Any]]
    rank: int | None


def read_message(frames: list[bytes]) -> Message:
    topic, number, payload = frames
    assert len(number) == 8
    batch = msgspec.msgpack.decode(payload)
    assert isinstance(batch, list) and len(batch) == 3 and isinstance(batch[0], float)
    for event in batch[1]:
        assert event.keys() - {"type"} <= set(FIELDS[event["type"]])
    return Message(topic.decode(), int.from_bytes(number, "big"), batch[0], batch[1], batch[2])


def cbor(value: Any) -> bytes:
    """The canonical CBOR of a value, by the RFC's text."""

    def head(major: int, count: int) -> bytes:
        if count < 24:
            return bytes([32 * major + count])
        for power, last in enumerate((2**8, 2**16, 2**32, 2**64)):
            if count < last:
                return bytes([32 * major + 24 + power]) + count.to_bytes(2**power, "big")
        raise OverflowError(count)

    if value is None:
        return bytes([0xF6])
    if isinstance(value, int):
        return head(0, value)
    if isinstance(value, bytes):
        return head(2, len(value)) + value
    if isinstance(value, str):
        return head(3, len(value.encode())) + value.encode()
    return head(4, len(value)) + b"".join(cbor(item) for item in value)


def block_hashes(
    tokens: list[int], page_size: int, *, seed: str, lora_name: str | None = None, salt: str | None = None
) -> list[bytes]:
    """The hashes of the full pages of a prompt, as vLLM's documentation has them for `sha256_cbor`."""
    hashes, parent = [], sha256(cbor(seed)).digest()
    for start in range(0, len(tokens) - page_size + 1, page_size):
        keys = [key for key in (lora_name, None if start else salt) if key is not None]
        parent = sha256(cbor((parent, tokens[start : start + page_size], tuple(keys) or None))).digest()
        hashes.append(parent)
    return hashes


@dataclass
class Indexer:
    """Which blocks an engine has, by medium. Pages are also known by their tokens, through their parents."""

    blocks: dict[str, set[int]] = field(default_factory=lambda: {"GPU": set(), "CPU": set()})
    prefixes: dict[int, tuple[Any, ...]] = field(default_factory=dict)  # hash -> model, and all tokens up to its end
    seen: Counter[str] = field(default_factory=Counter)

    def take(self, message: Message) -> None:
        for event in message.events:
            self.seen[event["type"]] += 1
            match event["type"]:
                case "BlockStored":
                    self._store(event)
                case "BlockRemoved":
                    for block in event["block_hashes"]:
                        self.blocks[event["medium"]].remove(block)
                case "AllBlocksCleared":
                    for blocks in self.blocks.values():
                        blocks.clear()

    def _store(self, event: dict[str, Any]) -> None:
        assert set(STORED[:7]) <= event.keys()
        added = event["block_hashes"]
        assert added and self.blocks[event["medium"]].isdisjoint(added) and len(set(added)) == len(added)
        self.blocks[event["medium"]].update(added)
        if not event["token_ids"]:  # a page that is known, in another medium
            assert set(added) <= self.prefixes.keys()
            return
        size, tokens = event["block_size"], event["token_ids"]
        assert len(tokens) == size * len(added) == size * len(event["extra_keys"])
        assert (event["group_idx"], event["kv_cache_spec_kind"]) == (0, "full_attention")
        parent = event["parent_block_hash"]
        prefix = (event["lora_name"], *(event["extra_keys"][0] or ())) if parent is None else self.prefixes[parent]
        for place, block in enumerate(added):
            prefix = (*prefix, *tokens[place * size : (place + 1) * size])
            self.prefixes[block] = prefix


class Reader:
    """A SUB socket at an engine's endpoint."""

    def __init__(self, endpoint: str, topic: str = "", *, binds: bool = False, server: bytes | None = None) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
        if server is not None:
            as_client(self.socket, Keys.drawn(), server)
        if binds:
            self.socket.bind(endpoint)
        else:
            self.socket.connect(endpoint)

    def next(self, timeout_s: float = 30) -> Message:
        assert self.socket.poll(int(timeout_s * 1000)), "no message has come"
        return read_message(self.socket.recv_multipart())

    def close(self) -> None:
        self.context.destroy(linger=0)


def replay(endpoint: str, first: int, timeout_s: float = 30, server: bytes | None = None) -> list[Message]:
    """The messages from a number on that the engine has kept."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        if server is not None:
            as_client(socket, Keys.drawn(), server)
        socket.connect(endpoint)
        socket.send_multipart((b"", first.to_bytes(8, "big")))
        messages = []
        while True:
            assert socket.poll(int(timeout_s * 1000)), "the replay does not end"
            empty, *frames = socket.recv_multipart()
            assert empty == b""
            if frames[1] == b"\xff" * 8 and frames[2] == b"":
                return messages
            messages.append(read_message(frames))
