"""Serves the K/V pages that an engine keeps to other engines, on a separate thread.

The messages go over ZeroMQ and TCP, from a DEALER (`fetched_pages.py`) to a ROUTER. `token, index` asks for a page of a
prompt, and `token` alone says that no more of its pages are wanted. The answer is `token, index, checksum, tokens,
page`, or `token, index` if the page will never be there. Answers may come in another order than the questions.

Connections are encrypted (`curve.py`). The socket's key pair is drawn at the start. Clients with an API key get the
public key over HTTP, with the token of a prompt. A peer without it cannot connect.
"""

from __future__ import annotations

import threading
from collections import deque
from struct import Struct
from typing import TYPE_CHECKING, NamedTuple

import zmq

from batcher.page_store import KeptPage, NoPage
from server.engine.bounded_listener import BoundedListener
from server.engine.curve import Keys, as_server, limit

if TYPE_CHECKING:
    from batcher.engine import Engine

TOKEN_BYTES = 16
INDEX = Struct("<I")
CHECKSUM = Struct("<Q")
MAX_ASKED_BYTES = 1024  # of a frame of a question, or of the handshake
WINDOW = 8  # pages that are asked for ahead, so that the network is busy while a page is checked
WAIT_MS = 1  # between two checks for pages that are being copied to the host
MAX_WAITING = 4096  # questions that wait for such pages
UNSENT = 8 * WINDOW  # answers that wait for one engine to read them; more are dropped


class _Question(NamedTuple):
    peer: bytes
    token: bytes
    number: int  # the index of the page in its prompt


class PageServer:
    """Serves pages from its creation to `close`.

    Args:
        host: the address to listen on.
        port: the port to listen on; 0: any free one.

    Attributes:
        port: the port at which it listens.
        key: the socket's public key, which peers must know.

    Raises:
        ValueError: the address or the port cannot be used.
    """

    def __init__(self, engine: Engine, host: str, port: int) -> None:
        self._engine = engine
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, UNSENT)
        limit(socket, MAX_ASKED_BYTES)
        keys = Keys.drawn()
        as_server(socket, keys)
        try:
            self._listener = BoundedListener(socket, host, port)
        except OSError as error:
            self._context.destroy()
            raise ValueError(f"--kv-port {port}: pages cannot be given at {host}: {error.strerror}") from error
        self.port, self.key = self._listener.port, keys.public.decode()
        self._waiting: deque[_Question] = deque()
        self._thread = threading.Thread(target=self._serve, name="page-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread. What was not sent is dropped."""
        self._context.term()
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        try:
            while True:
                if self._socket.poll(WAIT_MS if self._waiting else None):
                    self._read(self._socket.recv_multipart())
                for _ in range(len(self._waiting)):
                    self._answer(self._waiting.popleft())
        except zmq.ContextTerminated:
            self._socket.close()

    def _read(self, frames: list[bytes]) -> None:
        """Handles a message of a peer. Malformed messages are ignored."""
        match frames:
            case [_, token] if len(token) == TOKEN_BYTES:
                self._engine.drop_kept(token)
            case [peer, token, index] if len(token) == TOKEN_BYTES and len(index) == INDEX.size:
                self._answer(_Question(peer, token, *INDEX.unpack(index)))

    def _answer(self, asked: _Question) -> None:
        page = self._engine.kept_page(asked.token, asked.number)
        if page is NoPage.NOT_YET and len(self._waiting) < MAX_WAITING:
            self._waiting.append(asked)
            return
        answer: list[bytes | memoryview] = [asked.peer, asked.token, INDEX.pack(asked.number)]
        if isinstance(page, KeptPage):
            answer += [CHECKSUM.pack(page.checksum), page.tokens, memoryview(page.page)]
        self._socket.send_multipart(answer, copy=False)  # the page may change meanwhile: its checksum shows it
