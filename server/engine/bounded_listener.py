"""A TCP port with a bounded number of connections in front of a ZeroMQ socket.

ZeroMQ itself accepts connections until the process has no descriptors left. Here the ZeroMQ socket listens at a Unix
socket, in a folder that only this user may enter. A thread accepts a bounded number of TCP connections and forwards
their bytes. A further connection replaces the oldest one whose handshake has not progressed. If there is none, it waits
in the system's queue, without a descriptor. ZeroMQ closes connections that do not complete their handshake.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
import threading

import zmq

from server.engine.scratch_folder import folder_for_sockets
from server.logs import ThrottledLog

MOST_CONNECTIONS = 64
SHARE = 8  # all connections take at most this part of the free descriptors
DESCRIPTORS = 3  # of a connection: the TCP socket, and both ends of the Unix socket
GREETING_BYTES = 64  # ZeroMQ's greeting. A peer gets more if it knows the socket's key, or if there is no key
# The most bytes of a read. A connection that fills the first buffer gets the second one.
FIRST_READ_BYTES, READ_BYTES = 1 << 12, 1 << 18
RETRY_S = 0.1  # the wait after a connection that could not be accepted
LEAVE_S = 1.0  # the time at the end for bytes that are not sent yet
KEEP_ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}  # detects machines that have gone

_log = ThrottledLog(logging.getLogger("pallas_serve"))


class BoundedListener:
    """Listens from its creation to `close`.

    Args:
        inner: the ZeroMQ socket, not bound yet. Close it before this listener.
        host: the address to listen on; "*": all IPv4 addresses of this machine. IPv6 may be in brackets.
        port: the port to listen on; 0: any free one.
        most_bytes: the bytes that a peer may send before it is disconnected; None: any number. Without CURVE this
            bounds the memory of a message that does not end.

    Raises OSError if the address or the port cannot be used.
    """

    def __init__(self, inner: zmq.Socket[bytes], host: str, port: int, *, most_bytes: int | None = None) -> None:
        self._most_bytes = most_bytes
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.socket(family)
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind(("" if host == "*" else host.strip("[]"), port))
            self._listener.listen()
            self._listener.setblocking(False)
        except BaseException:
            self._listener.close()
            raise
        self.port = int(self._listener.getsockname()[1])
        self._folder = folder_for_sockets()
        self._path = str(self._folder.path / "zmq")
        inner.bind(f"ipc://{self._path}")
        self._num_sent: dict[asyncio.Task[None], int] = {}  # bytes to each connection, the oldest first
        self._loop = asyncio.new_event_loop()
        self._accepting = self._loop.create_task(self._accept(most_connections()))
        self._thread = threading.Thread(target=self._run, name="tcp-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread. Bytes that the closed socket has sent are forwarded first, for at most LEAVE_S."""
        self._loop.call_soon_threadsafe(self._accepting.cancel)
        self._thread.join()
        self._listener.close()
        self._folder.cleanup()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._until_closed())

    async def _until_closed(self) -> None:
        await asyncio.wait([self._accepting])
        if self._num_sent:
            await asyncio.wait(self._num_sent, timeout=LEAVE_S)

    async def _accept(self, most: int) -> None:
        while True:
            try:
                connection, _ = await self._loop.sock_accept(self._listener)
            except OSError as error:  # the peer has left meanwhile, or other parts of the process have no descriptors
                _log.warning("port %d could not accept a connection: %s", self.port, error.strerror)
                await asyncio.sleep(RETRY_S)
                continue
            task = self._loop.create_task(self._pass_on(connection))
            self._num_sent[task] = 0
            task.add_done_callback(self._num_sent.pop)
            while len(self._num_sent) > most:
                unproven = [one for one, sent in self._num_sent.items() if sent <= GREETING_BYTES and one is not task]
                if unproven:
                    unproven[0].cancel()
                await asyncio.wait(self._num_sent, return_when=asyncio.FIRST_COMPLETED)

    async def _pass_on(self, connection: socket.socket) -> None:
        """Forwards bytes in both directions until either end closes."""
        with contextlib.ExitStack() as both:
            both.enter_context(connection)
            try:
                inner = both.enter_context(socket.socket(socket.AF_UNIX))
                inner.setblocking(False)
                _keep_alive(connection)
                await self._loop.sock_connect(inner, self._path)
            except OSError as error:
                _log.warning("port %d could not serve a connection: %s", self.port, error.strerror)
                return
            task = asyncio.current_task()
            assert task is not None
            ways = [
                self._loop.create_task(self._receive(connection, inner)),
                self._loop.create_task(self._send(inner, connection, task)),
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)

    async def _receive(self, connection: socket.socket, inner: socket.socket) -> None:
        buffer, total = memoryview(bytearray(FIRST_READ_BYTES)), 0
        while size := await self._loop.sock_recv_into(connection, buffer):
            total += size
            if self._most_bytes is not None and total > self._most_bytes:
                return
            await self._loop.sock_sendall(inner, buffer[:size])
            buffer = _enough(buffer, size)

    async def _send(self, inner: socket.socket, connection: socket.socket, task: asyncio.Task[None]) -> None:
        buffer = memoryview(bytearray(FIRST_READ_BYTES))
        while size := await self._loop.sock_recv_into(inner, buffer):
            await self._loop.sock_sendall(connection, buffer[:size])
            self._num_sent[task] += size
            buffer = _enough(buffer, size)


def most_connections() -> int:
    """The most connections of one listener. They take at most one part in SHARE of the free descriptors."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    free = limit - len(os.listdir("/dev/fd"))
    return max(1, min(MOST_CONNECTIONS, free // SHARE // DESCRIPTORS))


def _enough(buffer: memoryview, size: int) -> memoryview:
    """The buffer for the read after one of `size` bytes: a larger one if this one was full. Strangers who connect often
    and send little then take little memory."""
    return memoryview(bytearray(READ_BYTES)) if size == len(buffer) < READ_BYTES else buffer


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in KEEP_ALIVE.items():
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
