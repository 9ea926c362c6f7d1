"""TCP ports in front of ZeroMQ sockets: many connections, silent ones, and the descriptors of the process."""

from __future__ import annotations

import contextlib
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import zmq

from server.engine.bounded_listener import DESCRIPTORS, MOST_CONNECTIONS, SHARE, BoundedListener, most_connections
from server.engine.curve import HANDSHAKE_S, Keys, as_client, as_server, limit
from tests.e2e.conftest import ROOT

# A socket behind a listener, in a process with few descriptors: it sends messages back. It ends when its input does.
ECHO = """
import resource, sys, threading
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
import zmq
from server.engine.bounded_listener import BoundedListener
from server.engine.curve import Keys, as_server, limit

context, keys = zmq.Context(), Keys.drawn()
socket = context.socket(zmq.ROUTER)
socket.setsockopt(zmq.LINGER, 0)
limit(socket, 1024)
as_server(socket, keys)
listener = BoundedListener(socket, "127.0.0.1", 0)

def answer():
    try:
        while True:
            message = socket.recv_multipart()
            open("/dev/urandom").close()  # as much else in an engine does
            socket.send_multipart(message)
    except zmq.ContextTerminated:
        socket.close()

answering = threading.Thread(target=answer)
answering.start()
print(listener.port, keys.public.decode(), flush=True)
sys.stdin.read()
context.term()
answering.join()
listener.close()
"""


@contextlib.contextmanager
def asking() -> Iterator[tuple[zmq.Socket[bytes], int]]:
    """A socket that may ask the process, and the process's port."""
    command = [sys.executable, "-c", ECHO]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port, key = process.stdout.readline().split()
        with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
            peer.setsockopt(zmq.LINGER, 0)
            peer.setsockopt(zmq.RCVTIMEO, 60_000)
            as_client(peer, Keys.drawn(), key.encode())
            peer.connect(f"tcp://127.0.0.1:{port}")
            yield peer, int(port)
        assert process.poll() is None
        process.communicate("")
    assert process.returncode == 0


def connect(port: int, stack: contextlib.ExitStack) -> socket.socket:
    return stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))


def test_more_connections_than_descriptors_leave_the_process_its_own() -> None:
    """Silent ones, and all are open while an honest peer asks."""
    with asking() as (peer, port), contextlib.ExitStack() as stack:
        for _ in range(200):
            connect(port, stack)
        peer.send(b"page")
        assert peer.recv() == b"page"


def test_a_peer_that_is_connected_stays_so_whoever_comes() -> None:
    with asking() as (peer, port), contextlib.ExitStack() as stack:
        events = peer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        for number in range(3):
            peer.send(b"%d" % number)
            assert peer.recv() == b"%d" % number
            for _ in range(100):
                connect(port, stack)
        assert not events.poll(0)
        peer.disable_monitor()
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
