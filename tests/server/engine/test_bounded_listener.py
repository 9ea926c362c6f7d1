"""TCP ports in front of ZeroMQ sockets: many connections, silent ones, and the descriptors of the process."""

from __future__ import annotations

import contextlib
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
import zmq

from batcher.page_store import PageSource
from server.engine.bounded_listener import DESCRIPTORS, MOST_CONNECTIONS, SHARE, BoundedListener, most_connections
from server.engine.curve import HANDSHAKE_S, Keys, as_client, as_server, limit
from server.engine.fetched_pages import FetchedPages
from server.engine.page_server import TOKEN_BYTES
from tests.e2e.conftest import ROOT

PAGE_BYTES = 5000
TOKEN = bytes(TOKEN_BYTES)
# An engine that gives one page, in a process with few descriptors. It ends when its input does.
GIVER = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
import numpy as np
from xxhash import xxh3_64_intdigest
from batcher.page_store import KeptPage
from server.engine.page_server import PageServer

class Keeper:
    page = np.arange({PAGE_BYTES}, dtype=np.uint8)

    def kept_page(self, token, index):
        open("/dev/urandom").close()  # as much else in an engine does
        return KeptPage(b"tokens", xxh3_64_intdigest(self.page), self.page)

    def drop_kept(self, token):
        pass

own = PageServer(Keeper(), "127.0.0.1", 0)
print(own.port, getattr(own, "key", ""), flush=True)
sys.stdin.read()
own.close()
"""


@contextlib.contextmanager
def giver() -> Iterator[PageSource]:
    command = [sys.executable, "-c", GIVER]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port, key = process.stdout.readline().split()
        yield PageSource(address=f"tcp://127.0.0.1:{port}", key=key, token=TOKEN, keep_s=3600)
        assert process.poll() is None
        process.communicate("")
    assert process.returncode == 0


def connect(port: int, stack: contextlib.ExitStack) -> socket.socket:
    return stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))


def port_of(source: PageSource) -> int:
    return int(source.address.rpartition(":")[2])


def test_more_connections_than_descriptors_leave_the_process_its_own() -> None:
    """Silent ones, and all are open while an honest engine asks."""
    with giver() as source, contextlib.ExitStack() as stack, closing(FetchedPages(PAGE_BYTES, page_s=60)) as pages:
        for _ in range(200):
            connect(port_of(source), stack)
        pages.expect([b"digest"], source)
        page = np.zeros(PAGE_BYTES, np.uint8)
        assert pages.load(b"digest", b"tokens", page)
        np.testing.assert_array_equal(page, np.arange(PAGE_BYTES, dtype=np.uint8))


def test_an_engine_that_is_connected_stays_so_whoever_comes() -> None:
    with giver() as source, contextlib.ExitStack() as stack, closing(FetchedPages(PAGE_BYTES, page_s=60)) as pages:
        page = np.zeros(PAGE_BYTES, np.uint8)
        for number in range(3):
            pages.expect([b"%d" % number, b"next"], source)
            assert pages.load(b"%d" % number, b"tokens", page)
            (known,) = pages._sockets.values()
            if number == 0:
                events = known.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            for _ in range(100):
                connect(port_of(source), stack)
        assert not events.poll(0)
        known.disable_monitor()
        events.close()


@contextlib.contextmanager
def pulling() -> Iterator[tuple[zmq.Socket[bytes], BoundedListener, Keys]]:
    with zmq.Context() as context:
        inner, keys = context.socket(zmq.PULL), Keys.drawn()
        limit(inner, 1024)
        as_server(inner, keys)
        listener = BoundedListener(inner, "127.0.0.1", 0)
        yield inner, listener, keys
        inner.close()
        listener.close()


@pytest.mark.slow
def test_silent_peers_are_closed() -> None:
    with pulling() as (_, listener, _), contextlib.ExitStack() as stack:
        silent = connect(listener.port, stack)
        silent.settimeout(4 * HANDSHAKE_S)
        while silent.recv(1 << 16):  # the greeting, and then the end
            pass


def test_beyond_the_bound_a_peer_that_knows_the_key_waits(monkeypatch) -> None:
    monkeypatch.setattr("server.engine.bounded_listener.MOST_CONNECTIONS", 1)
    with pulling() as (inner, listener, keys), zmq.Context() as context:
        peers = [context.socket(zmq.PUSH) for _ in range(3)]
        for number, peer in enumerate(peers):
            peer.setsockopt(zmq.LINGER, 0)
            as_client(peer, Keys.drawn(), keys.public)
            peer.connect(f"tcp://127.0.0.1:{listener.port}")
            peer.send(b"%d" % number)
            if number < 2:
                assert inner.recv() == b"%d" % number
        peers[0].send(b"again")
        assert inner.recv() == b"again"
        peers[0].close()
        assert inner.recv() == b"2"
        for peer in peers[1:]:
            peer.close()


def test_few_descriptors_mean_few_connections() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        assert 1 <= most_connections() <= 256 // SHARE // DESCRIPTORS
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1 << 14), hard))
        assert most_connections() == MOST_CONNECTIONS
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_all_bytes_pass_both_ways() -> None:
    with zmq.Context() as context:
        inner, outer = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        listener = BoundedListener(inner, "127.0.0.1", 0)
        outer.connect(f"tcp://127.0.0.1:{listener.port}")
        message = np.random.default_rng(0).bytes(5_000_000)
        for one, other in ((outer, inner), (inner, outer)):
            one.send(message)
            assert other.recv() == message
        inner.send(b"last")
        inner.close()  # what was sent before still arrives
        listener.close()
        assert outer.recv() == b"last"
        outer.close()
