"""Fetches K/V pages from the host memory of other engines, which give them with `page_server.py`."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import zmq
from xxhash import xxh3_64_intdigest

from batcher.page_store import PageSource
from server.engine.curve import Keys, as_client, limit
from server.engine.page_server import CHECKSUM, INDEX, WINDOW
from server.logs import ThrottledLog

PAGE_S = 3.0  # the time limit of a page; after it, all pages that are expected from its engine are given up
MOST_ENGINES = 64  # the most engines to which connections are open
OVERHEAD_BYTES = 1024  # the most that encryption adds to a frame, and the most of the handshake


@dataclass(eq=False, slots=True)
class _Prompt:
    source: PageSource
    digests: Sequence[bytes]
    until_s: float
    asked: set[int] = field(default_factory=set)  # indices of pages that have been asked for, and have not arrived
    arrived: dict[int, list[zmq.Frame]] = field(default_factory=dict)  # answers, by the index of the page


class FetchedPages:
    """A `batcher.page_store.RemotePages` over ZeroMQ. Loading a page fetches it, with the next pages of its prompt.

    Attributes:
        num_pages: the number of pages that were loaded.
        num_failed: the number of prompts of which a page did not arrive.
    """

    def __init__(self, page_bytes: int, *, page_s: float = PAGE_S, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_pages = self.num_failed = 0
        self._page_bytes = page_bytes
        self._page_s = page_s
        self._keys = Keys.drawn()
        self._clock = clock
        self._log = ThrottledLog(logging.getLogger("pallas_serve"))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # By address and key, of the thread that loads. The least recently used are first.
        self._sockets: OrderedDict[tuple[str, str], zmq.Socket[bytes]] = OrderedDict()
        self._lock = threading.Lock()  # of what follows
        self._expected: dict[bytes, tuple[_Prompt, int]] = {}  # digest -> its prompt, and its index there
        self._prompts: dict[bytes, _Prompt] = {}  # by token

    def expect(self, digests: Sequence[bytes], source: PageSource) -> None:
        """Notes that the first pages of a prompt can be fetched from `source`, each once. Forgets prompts whose pages
        are no longer kept."""
        now = self._clock()
        with self._lock:
            for prompt in [prompt for prompt in self._prompts.values() if prompt.until_s <= now]:
                self._forget(prompt)
            prompt = self._prompts[source.token] = _Prompt(source, digests, now + source.keep_s)
            for index, digest in enumerate(digests):
                self._expected.setdefault(digest, (prompt, index))

    def has(self, digest: bytes) -> bool:
        return digest in self._expected

    def load(self, digest: bytes, tokens: bytes, page: np.ndarray) -> bool:
        """Fetches a page into `page`, u8[page_bytes]. Returns False if it did not arrive or is not the page of
        `tokens`, i32[page_size]; the contents of `page` are then undefined."""
        with self._lock:
            prompt, index = self._expected.pop(digest, (None, 0))
        if prompt is None:
            return False
        try:
            fault = self._fetch(prompt, index, tokens, page)
        except (zmq.ZMQError, ValueError) as error:  # of an address or a key that is none
            fault = str(error)
        if fault is None:
            self.num_pages += 1
        else:
            self.num_failed += 1
            self._log.warning("pages from %s were not loaded, and are computed here: %s", prompt.source.address, fault)
        if fault is not None or index == len(prompt.digests) - 1:
            self._leave(prompt)
        return fault is None

    def clear(self) -> None:
        with self._lock:
            self._expected.clear()
            self._prompts.clear()

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _fetch(self, prompt: _Prompt, index: int, tokens: bytes, page: np.ndarray) -> str | None:
        """Fills `page`. Returns the reason if it could not, else None."""
        if prompt.until_s <= self._clock():
            return "they are not kept there any more"
        socket = self._socket_to(prompt.source)
        for ahead in range(index, min(index + WINDOW, len(prompt.digests))):
            if ahead not in prompt.asked and ahead not in prompt.arrived:
                prompt.asked.add(ahead)
                socket.send_multipart([prompt.source.token, INDEX.pack(ahead)], zmq.NOBLOCK)
        until = min(self._clock() + self._page_s, prompt.until_s)
        while index not in prompt.arrived:
            if (left_s := until - self._clock()) <= 0 or not socket.poll(math.ceil(left_s * 1000)):
                self._give_up(prompt.source)
                return f"a page did not come within {self._page_s:g} s"
            self._take(socket.recv_multipart(copy=False))
        return self._fault_of(prompt.arrived.pop(index), tokens, page)

    def _take(self, frames: list[zmq.Frame]) -> None:
        """Keeps an answer. Answers that were not asked for, or whose prompt has been forgotten, are dropped."""
        prompt = self._prompts.get(frames[0].bytes)
        if prompt is None or len(frames) < 2 or len(frames[1]) != INDEX.size:
            return
        (index,) = INDEX.unpack(frames[1].bytes)
        if index in prompt.asked:
            prompt.asked.remove(index)
            prompt.arrived[index] = frames[2:]

    def _fault_of(self, content: list[zmq.Frame], tokens: bytes, page: np.ndarray) -> str | None:
        """Copies an answer into `page`. Returns the reason if it cannot be used, else None."""
        if not content:
            return "they are not kept there any more"
        if [len(frame) for frame in content] != [CHECKSUM.size, len(tokens), self._page_bytes]:
            return "a page is of another form"
        checksum, own_tokens, own_page = content
        if own_tokens.bytes != tokens:
            return "a page is of other tokens"
        page[:] = np.frombuffer(own_page.buffer, np.uint8)
        is_whole = CHECKSUM.unpack(checksum.bytes)[0] == xxh3_64_intdigest(page)
        return None if is_whole else "a page was damaged on its way"

    def _socket_to(self, source: PageSource) -> zmq.Socket[bytes]:
        engine = (source.address, source.key)
        if (known := self._sockets.get(engine)) is not None:
            self._sockets.move_to_end(engine)
            return known
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.IPV6, "[" in source.address)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, 2 * WINDOW)
            limit(socket, self._page_bytes + OVERHEAD_BYTES)
            as_client(socket, self._keys, source.key.encode())
            socket.connect(source.address)
        except (zmq.ZMQError, ValueError):
            socket.close()
            raise
        self._sockets[engine] = socket
        if len(self._sockets) > MOST_ENGINES:
            self._sockets.popitem(last=False)[1].close()
        return socket

    def _give_up(self, source: PageSource) -> None:
        """Expects no more pages from this engine. Late answers are dropped."""
        self._sockets.pop((source.address, source.key)).close()
        with self._lock:
            for prompt in [prompt for prompt in self._prompts.values() if prompt.source.address == source.address]:
                self._forget(prompt)

    def _leave(self, prompt: _Prompt) -> None:
        """Tells the other engine that no more pages of the prompt are wanted, so that it can drop them."""
        with self._lock:
            self._forget(prompt)
        socket = self._sockets.get((prompt.source.address, prompt.source.key))
        if socket is not None:
            with contextlib.suppress(zmq.Again):  # it is not connected, and drops them later by itself
                socket.send_multipart([prompt.source.token], zmq.NOBLOCK)

    def _forget(self, prompt: _Prompt) -> None:
        self._prompts.pop(prompt.source.token, None)
        for digest in prompt.digests:
            if self._expected.get(digest, (None, 0))[0] is prompt:
                del self._expected[digest]
