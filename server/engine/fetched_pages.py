"""Pages that come from the host's memory of other engines (`page_server.py`): a `batcher.page_store.RemotePages`."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import zmq
from xxhash import xxh3_64_intdigest

from batcher.page_store import PageSource
from server.engine.page_server import CHECKSUM, INDEX, WINDOW
from server.logs import ThrottledLog

SILENCE_S = 2.0  # without an answer of an engine; its pages are then given up


@dataclass(eq=False, slots=True)
class _Prompt:
    source: PageSource
    digests: Sequence[bytes]
    until_s: float
    asked: set[int] = field(default_factory=set)  # indices of pages that have been asked for, and are not loaded
    arrived: dict[int, list[zmq.Frame]] = field(default_factory=dict)  # of these, the answers


class FetchedPages:
    """See `RemotePages`. A page is fetched when it is loaded, with the next ones of its prompt.

    Attributes:
        num_pages: that were loaded.
        num_failed: prompts of which a page did not come.
    """

    def __init__(
        self, page_bytes: int, *, silence_s: float = SILENCE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.num_pages = self.num_failed = 0
        self._page_bytes = page_bytes
        self._silence_s = silence_s
        self._clock = clock
        self._log = ThrottledLog(logging.getLogger("pallas_serve"))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}  # by address, of the thread that loads
        self._lock = threading.Lock()  # of what follows
        self._expected: dict[bytes, tuple[_Prompt, int]] = {}  # digest -> its prompt, and its index there
        self._prompts: dict[bytes, _Prompt] = {}  # by token

    def expect(self, digests: Sequence[bytes], source: PageSource) -> None:
        """See `RemotePages`. Prompts that are kept no longer are forgotten."""
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
        """See `RemotePages`. After False, `page` may hold anything."""
        with self._lock:
            prompt, index = self._expected.pop(digest, (None, 0))
        if prompt is None:
            return False
        try:
            fault = self._fetch(prompt, index, tokens, page)
        except zmq.ZMQError as error:  # of an address that is none
            fault = error.strerror
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
        """Fills `page`. Returns why it could not."""
        address = prompt.source.address
        socket = self._sockets.get(address) or self._connect(address)
        for ahead in range(index, min(index + WINDOW, len(prompt.digests))):
            if ahead not in prompt.asked:
                prompt.asked.add(ahead)
                socket.send_multipart([prompt.source.token, INDEX.pack(ahead)])
        while index not in prompt.arrived:
            if not socket.poll(int(self._silence_s * 1000)):
                self._give_up(address)
                return f"no answer within {self._silence_s:g} s"
            self._take(socket.recv_multipart(copy=False))
        prompt.asked.discard(index)
        return self._fault_of(prompt.arrived.pop(index), tokens, page)

    def _take(self, frames: list[zmq.Frame]) -> None:
        """An answer has come. That of a prompt that was left meanwhile is of no use, and neither is what is none."""
        prompt = self._prompts.get(frames[0].bytes)
        if prompt is not None and len(frames) > 1 and len(frames[1]) == INDEX.size:
            prompt.arrived[INDEX.unpack(frames[1].bytes)[0]] = frames[2:]

    def _fault_of(self, content: list[zmq.Frame], tokens: bytes, page: np.ndarray) -> str | None:
        """Copies what has come into `page`. Returns why it cannot be used."""
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

    def _connect(self, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IPV6, "[" in address)
        socket.setsockopt(zmq.LINGER, 0)
        try:
            socket.connect(address)
        except zmq.ZMQError:
            socket.close()
            raise
        self._sockets[address] = socket
        return socket

    def _give_up(self, address: str) -> None:
        """No page is expected from there any more, and what comes late is dropped."""
        self._sockets.pop(address).close()
        with self._lock:
            for prompt in [prompt for prompt in self._prompts.values() if prompt.source.address == address]:
                self._forget(prompt)

    def _leave(self, prompt: _Prompt) -> None:
        """No more pages of the prompt are wanted: the other engine need not keep them."""
        with self._lock:
            self._forget(prompt)
        socket = self._sockets.get(prompt.source.address)
        if socket is not None:
            socket.send_multipart([prompt.source.token])

    def _forget(self, prompt: _Prompt) -> None:
        self._prompts.pop(prompt.source.token, None)
        for digest in prompt.digests:
            if self._expected.get(digest, (None, 0))[0] is prompt:
                del self._expected[digest]
