"""Sends the engine's outputs to the HTTP processes: sorts them by API server and gathers those of a step in a message.

With several HTTP processes, each is an API server. A request's outputs are tagged with its API server when they are
made. Plain tokens come in columns over all requests. The sender's thread splits them by the API servers of the
requests' first outputs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import msgspec
import numpy as np
import zmq

from batcher.delivery import Tokens
from batcher.request import RequestOutput
from server.engine import wire

FIRST = 0  # the number of the API server that started the engine
ZmqContext = zmq.Context[zmq.Socket[bytes]]


@dataclass(frozen=True, slots=True)
class Addressed:
    """An item for one API server."""

    api_server: int
    item: RequestOutput | wire.Output | wire.Event


Item = RequestOutput | Tokens | wire.Output | wire.Event  # what a message is made of
Queued = Item | Addressed | wire.AddApiServer | wire.RemoveApiServer


class Sender:
    """The outgoing sockets and the thread that owns them. `put` may be called from any thread and never blocks. `None`
    ends the thread. `address` is that of the first API server's socket.
    """

    def __init__(self, address: str) -> None:
        self._queue: SimpleQueue[Queued | None] = SimpleQueue()
        self.put = self._queue.put
        self._thread = threading.Thread(target=self._send_all, args=(address,), name="sender", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Sends the queued items, then ends the thread. May be called again."""
        self.put(None)
        self._thread.join()

    def _send_all(self, address: str) -> None:
        context: ZmqContext = zmq.Context()  # its own, which can be closed while other threads use theirs
        sockets = {FIRST: _connected(context, address)}  # by API server
        sorter: Sorter | None = None  # from the second API server on
        encode = msgspec.msgpack.Encoder().encode

        def send(items: list[Queued]) -> None:
            for api_server, own in ({FIRST: items} if sorter is None else sorter.sort(items)).items():
                for message in messages(own):  # type: ignore[arg-type]  # sorted, or for the only API server
                    sockets[api_server].send(encode(message))

        open_ = True
        while open_:
            items, open_ = self._gather()
            start = 0
            for i, item in enumerate(items):
                if isinstance(item, wire.AddApiServer | wire.RemoveApiServer):
                    send(items[start:i])
                    start = i + 1
                    sorter = sorter or Sorter()
                    if isinstance(item, wire.AddApiServer):
                        sockets[item.api_server] = _connected(context, item.address)
                    elif item.api_server in sockets:
                        sockets.pop(item.api_server).close(linger=0)
                    sorter.api_servers = set(sockets)
            send(items[start:])
        for socket in sockets.values():
            socket.close()
        context.term()

    def _gather(self) -> tuple[list[Queued], bool]:
        """Waits for an item. Returns all queued items, and whether more may follow."""
        items: list[Queued] = []
        item = self._queue.get()
        try:
            while item is not None:
                items.append(item)
                item = self._queue.get_nowait()
        except Empty:
            return items, True
        return items, False


def _connected(context: ZmqContext, address: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.SNDHWM, 0)  # unlimited: nothing is dropped or blocks; the server reads at once
    socket.setsockopt(zmq.LINGER, 1000)
    socket.connect(address)
    return socket


def messages(items: Iterable[Item]) -> Iterator[wire.Event]:
    """The messages for `items`. Each request gets its outputs and tokens in their order.

    Tokens end a message, because they are read after its outputs. Scores of a prompt also end a message: they are long,
    and the server's reader can yield after it.
    """
    outputs: list[wire.Output] = []
    for item in items:
        tokens = None
        if isinstance(item, RequestOutput):
            outputs.append(wire.output_to_wire(item))
            if item.prompt_logprobs is None:
                continue
        elif isinstance(item, wire.Output):
            outputs.append(item)
            continue
        elif isinstance(item, Tokens):
            tokens = wire.tokens_to_wire(item)
        else:
            if outputs:
                yield wire.Outputs(outputs)
            yield item
            outputs = []
            continue
        yield wire.Outputs(outputs, tokens)
        outputs = []
    if outputs:
        yield wire.Outputs(outputs)


class ApiServer:
    """An HTTP process with the ids of its open requests. Its `put` may be called from any thread."""

    def __init__(self, number: int, put: Callable[[Addressed], None]) -> None:
        self.open: set[str] = set()
        self._number = number
        self._put = put

    def put(self, item: RequestOutput | wire.Output | wire.Event) -> None:
        if isinstance(item, RequestOutput | wire.Output) and item.finish_reason is not None:
            self.open.discard(item.request_id)
        self._put(Addressed(self._number, item))


class Sorter:
    """Splits the engine's outputs and events by API server. Not thread-safe."""

    def __init__(self) -> None:
        self.api_servers: set[int] = {FIRST}  # the connected ones
        self.api_server_of: dict[int, int] = {}  # by number, of requests that have their first output and not the last

    def sort(self, items: Iterable[Queued]) -> dict[int, list[Item]]:
        """The items of each API server, in their order. Events for all API servers are in each list. Other events
        without an API server are in the first one's."""
        sorted_: dict[int, list[Item]] = {api_server: [] for api_server in self.api_servers}
        for item in items:
            for api_server, own in self._parts(item):
                if api_server in sorted_:  # a removed one's requests may have outputs until they are aborted
                    sorted_[api_server].append(own)
        return sorted_

    def _parts(self, item: Queued) -> Iterator[tuple[int, Item]]:
        match item:
            case Addressed(api_server=api_server, item=own):
                if isinstance(own, RequestOutput) and own.finish_reason is None:
                    self.api_server_of[own.number] = api_server
                elif isinstance(own, RequestOutput):
                    self.api_server_of.pop(own.number, None)
                yield api_server, own
            case Tokens():
                yield from self._split(item)
            case wire.WeightVersion() | wire.Stats() | wire.Adapters() | wire.Failed() | wire.Ended():
                yield from ((api_server, item) for api_server in self.api_servers)
            case wire.AddApiServer() | wire.RemoveApiServer():
                raise ValueError("API servers are added and removed between two sortings")
            case _:
                yield FIRST, item

    def _split(self, tokens: Tokens) -> Iterator[tuple[int, Tokens]]:
        api_servers = [self.api_server_of.get(number, FIRST) for number in tokens.numbers.tolist()]
        if len(set(api_servers)) == 1:
            yield api_servers[0], tokens
            return
        api_server_of_row = np.array(api_servers)
        for api_server in set(api_servers):
            rows = api_server_of_row == api_server
            if tokens.counts is None:
                yield api_server, Tokens(tokens.numbers[rows], tokens.token_ids[rows])
            else:
                ids = tokens.token_ids[np.repeat(rows, tokens.counts)]
                yield api_server, Tokens(tokens.numbers[rows], ids, tokens.counts[rows])
