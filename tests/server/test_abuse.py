"""Clients that leave, clients that do not read, and more of them than there is room for."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tests.server.support.canary import canary
from tests.server.support.requests import BULKY, CHAT, HELLO, LONG, load, running, send, wait_until, wait_until_idle
from tests.server.support.running import RunningServer

LONGER = LONG | {"max_tokens": 10_000}


def answers(server: RunningServer) -> bool:
    return server.post(CHAT, HELLO | {"max_tokens": 3}).status_code == 200


@pytest.fixture(autouse=True)
def _nobody_waits(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test here does to a server."""
    name = "slow" if "slow" in request.fixturenames else "echo"
    with canary(request.getfixturevalue(name)):
        yield


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request(slow, stream):
    connection = send(slow, LONGER | {"stream": stream})
    wait_until(lambda: running(slow) == 1)
    assert load(slow) == 1
    connection.close()
    wait_until(lambda: running(slow) == 0)
    wait_until(lambda: load(slow) == 0)


def test_two_hundred_clients_that_leave_mid_stream(slow):
    connections = [send(slow, LONGER) for _ in range(200)]
    for connection in connections:
        connection.settimeout(60)
        assert connection.recv(1) == b"H"  # each is being served
    assert load(slow) == 200
    wait_until(lambda: running(slow) == 200)
    for connection in connections:
        connection.close()
    assert answers(slow)
    wait_until(lambda: load(slow) == 0)
    wait_until(lambda: running(slow) == 0)


def test_clients_that_leave_before_they_have_sent_their_body(slow):
    host, port = slow.url.removeprefix("http://").split(":")
    for _ in range(20):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n{{".encode())
    assert answers(slow)
    wait_until(lambda: load(slow) == 0)


def test_what_is_not_http_is_refused(slow):
    host, port = slow.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"\x00\xff not http at all\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400")
    assert answers(slow)


def test_a_head_without_an_end_is_cut_off(slow):
    host, port = slow.url.removeprefix("http://").split(":")
    for piece in (b"a" * 1024, b"a: b\r\n" * 200):
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\nX-Long: ")
            with pytest.raises(ConnectionError):
                connection.sendall(piece * 16 * 1024)
    assert answers(slow)


def test_a_full_queue_is_said_at_once_and_with_the_right_status(slow):
    connections = [send(slow, LONGER) for _ in range(250)]
    try:
        wait_until(lambda: running(slow) == 250)
        with slow.http() as http:
            for stream in (False, True):
                response = http.post(CHAT, json=LONG | {"stream": stream})
                assert response.status_code == 429
                assert int(response.headers["retry-after"]) > 0
                error = response.json()["error"]
                assert error["code"] == "rate_limit_exceeded"
                assert "queue is full" in error["message"]
    finally:
        for connection in connections:
            connection.close()
    wait_until(lambda: running(slow) == 0)


def test_of_several_choices_none_runs_where_one_is_refused(slow):
    connections = [send(slow, LONGER) for _ in range(248)]
    try:
        wait_until(lambda: running(slow) == 248)
        assert slow.post(CHAT, LONG | {"n": 5, "stream": False}).status_code == 429
        wait_until(lambda: running(slow) == 248)
    finally:
        for connection in connections:
            connection.close()
    wait_until(lambda: running(slow) == 0)


def test_a_client_that_does_not_read_holds_up_nobody(echo):
    """The echo is as fast as it can: the stuck client's answer is made, and everybody else's too."""
    stuck = [send(echo, BULKY, receive_buffer=4096) for _ in range(4)]
    try:
        for connection in stuck:
            connection.settimeout(60)
            assert connection.recv(1) == b"H"
        for _ in range(5):
            assert answers(echo)
        wait_until_idle(echo)  # the engine has finished with the stuck ones as well
    finally:
        for connection in stuck:
            connection.close()
    wait_until(lambda: load(echo) == 0)


def test_a_stuck_client_gets_everything_once_it_reads(echo):
    connection = send(echo, BULKY, receive_buffer=4096)
    connection.settimeout(60)
    data = connection.recv(1)
    wait_until_idle(echo)  # the engine is done, most of the answer waits
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**20)
    while b"data: [DONE]" not in data:
        data += connection.recv(65536)
    connection.close()
    assert data.count(b'"finish_reason":"length"') == 2
