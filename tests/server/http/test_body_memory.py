"""Bodies that are being read: all connections together hold so many bytes, and no connection holds them for long."""

from __future__ import annotations

import contextlib
import select
import socket
import threading

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.http.limits import UnfinishedRequests
from server.http.request_error import RequestError
from tests.server.http.test_connection_limits import LONG_TIMES
from tests.server.support.echo_engine import EchoConfig
from tests.server.support.raw_http import TIMEOUT_S, answers, connect, only_answer, post, read_all
from tests.server.support.requests import CHAT, HELLO, wait_until
from tests.server.support.running import ECHO, running_server, server_of

MIB = 2**20
SHORT = HELLO | {"max_tokens": 3}
HEAD = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
CHUNK = b"%x\r\n%b\r\n" % (MIB, b" " * MIB)
MOST_MIB = 16
EVENTS = st.tuples(st.integers(0, 4), st.sampled_from(["read", "complete", "end"]), st.integers(1, 60))

small = server_of(EchoConfig(), max_body_memory_mib=MOST_MIB, **LONG_TIMES)


def send_what_is_read(connection: socket.socket, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):
        connection.sendall(data)


def ask(connection: socket.socket) -> int:
    connection.sendall(post(CHAT, SHORT, "Connection: close"))
    return only_answer(connection).status


def test_all_bodies_together_are_bounded(small):
    process = psutil.Process(small.process.pid)
    before = process.memory_info().rss
    with contextlib.ExitStack() as stack:
        bodies = [stack.enter_context(connect(small)) for _ in range(40)]
        for connection in bodies:
            send_what_is_read(connection, HEAD + CHUNK * 5)
        begun: dict[socket.socket, bytes] = {}  # the first bytes of answers
        wait_until(lambda: len(with_answers(bodies, begun)) >= 37)  # 3 x 5 MiB are held
        assert len(with_answers(bodies, begun)) <= 38
        # Bodies without the bound take 200 MiB.
        assert process.memory_info().rss - before < 6 * MOST_MIB * MIB
        for connection in bodies:
            connection.settimeout(TIMEOUT_S)
        refused = next(connection for connection in begun if begun[connection])
        (answer,) = answers(begun[refused] + read_all(refused))
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert "--max-body-memory" in answer.error()["message"]
        with connect(small) as connection:  # others are served meanwhile
            assert ask(connection) == 200
        waiting = [connection for connection in bodies if connection not in begun]
        for connection in waiting[1:]:
            connection.close()
        body = b'{"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}'
        waiting[0].sendall(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        assert read_all_of_one_answer(waiting[0]) == 200  # and so is a body that was not refused


def test_whoever_is_refused_may_send_the_rest_and_then_reads_the_answer(small):
    with contextlib.ExitStack() as stack:
        longest, *others = [stack.enter_context(connect(small)) for _ in range(4)]
        for connection, num_mib in ((longest, 5), *((other, 4) for other in others)):
            connection.sendall(HEAD + CHUNK * num_mib)
        assert select.select([longest], [], [], TIMEOUT_S)[0]  # it has been answered
        longest.sendall(CHUNK * 3 + b"0\r\n\r\n" + post(CHAT, SHORT, "Connection: close"))
        first, second = answers(read_all(longest))
        assert (first.status, second.status) == (503, 200)
        assert "--max-body-memory" in first.error()["message"]


def with_answers(connections: list[socket.socket], begun: dict[socket.socket, bytes]) -> dict[socket.socket, bytes]:
    """Those on which the server has answered or closed."""
    for connection in connections:
        if connection not in begun:
            connection.settimeout(0)
            with contextlib.suppress(BlockingIOError):
                begun[connection] = first_bytes(connection)
    return begun


def first_bytes(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1)
    except ConnectionError:
        return b""


def read_all_of_one_answer(connection: socket.socket) -> int:
    data = b""
    while b"usage" not in data and b"error" not in data:
        data += connection.recv(65536)
    return int(data.split()[1])


def test_what_was_held_is_given_back_however_a_request_ends(small):
    """Complete, cut off, refused by the application before its end, in pieces: ten times the bound in all."""
    whole = b'{"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3' + b" " * (5 * MIB) + b"}"
    too_large = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Length: {9 * MIB}\r\n\r\n".encode()
    for _ in range(10):
        with connect(small) as connection:
            send_what_is_read(connection, HEAD + CHUNK * 5)
        with connect(small) as connection:
            send_what_is_read(connection, too_large + b" " * MIB)
            assert answers(read_all(connection))[0].status == 413
        with connect(small) as connection:
            connection.sendall(HEAD.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
            connection.sendall(b"%x\r\n%b\r\n0\r\n\r\n" % (len(whole), whole))
            assert only_answer(connection).status == 200


@pytest.mark.parametrize("burst", [1, 5])
def test_a_body_that_is_slow_now_is_given_up_however_fast_it_began(tmp_path, burst):
    times = LONG_TIMES | {"body_timeout_s": 0.5}
    stop = threading.Event()

    def trickle(connection: socket.socket) -> None:
        with contextlib.suppress(ConnectionError):
            while not stop.wait(0.05):
                connection.sendall(b"1\r\n \r\n")

    with (
        running_server(tmp_path, ECHO, EchoConfig(), **times) as server,
        connect(server, HEAD + CHUNK * burst) as connection,
    ):
        thread = threading.Thread(target=trickle, args=[connection])
        thread.start()
        try:
            assert only_answer(connection).status == 408
        finally:
            stop.set()
            thread.join()


class Reader:
    """Ends as a real one does: it may not be refused twice."""

    def __init__(self) -> None:
        self.is_refused = False

    def refuse(self, error: RequestError) -> None:
        assert not self.is_refused
        assert (error.status, error.retry_after_s) == (503, 1)
        self.is_refused = True


@given(st.lists(EVENTS, max_size=40))
def test_the_longest_that_is_being_read_is_refused(events):
    unfinished = UnfinishedRequests(100)
    current = [Reader() for _ in range(5)]
    reading: dict[Reader, int] = {}
    decoding: dict[Reader, int] = {}
    for number, event, size in events:
        connection = current[number]
        if event == "read" and connection not in decoding:
            reading[connection] = reading.get(connection, 0) + size
            unfinished.read(connection, size)
            while sum(reading.values()) + sum(decoding.values()) > 100 and reading:
                longest = max(reading, key=reading.__getitem__)
                del reading[longest]
                assert longest.is_refused
        elif event == "complete" and connection in reading:
            decoding[connection] = reading.pop(connection)
            unfinished.complete(connection)
        elif event == "end":
            reading.pop(connection, None)
            decoding.pop(connection, None)
            unfinished.end(connection)
        assert not any(c.is_refused for c in (*reading, *decoding))
        current = [Reader() if c.is_refused else c for c in current]
