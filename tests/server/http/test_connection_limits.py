"""Time limits of heads, bodies, idle connections and answers nobody reads; how many connections there may be."""

from __future__ import annotations

import contextlib
import select
import signal
import socket

import httpx
import psutil
import pytest

from tests.server.support.echo_engine import EchoConfig
from tests.server.support.raw_http import answers, connect, only_answer, post, read_all
from tests.server.support.requests import BULKY, CHAT, HELLO, LONG, SLOW, load, running, send, wait_until
from tests.server.support.running import ECHO, RunningServer, running_server, server_of

pytestmark = pytest.mark.slow

SHORT = HELLO | {"max_tokens": 3}
VERSION = b"GET /version HTTP/1.1\r\nHost: a\r\n\r\n"
HALF_HEAD = b"GET /version HTTP/1.1\r\nHost"
HALF_BODY = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n{{".encode()
LONG_S = 1000.0
LONG_TIMES = {f"{name}_timeout_s": LONG_S for name in ("head", "body", "idle", "send")}


# Has no patience. The engine takes longer over a token than a client may over anything but a head: between the
# connection and the request, a busy machine may run others for a while.
hasty = server_of(EchoConfig(step_s=0.3), **dict.fromkeys(LONG_TIMES, 0.2) | {"head_timeout_s": 1.0})


def connect_all(stack: contextlib.ExitStack, server: RunningServer, data: bytes, number: int) -> list[socket.socket]:
    return [stack.enter_context(connect(server, data)) for _ in range(number)]


def is_closed(connection: socket.socket) -> bool:
    """Whether the server has closed or answered."""
    return bool(select.select([connection], [], [], 0)[0])


@pytest.mark.parametrize("data", [HALF_HEAD, HALF_BODY], ids=["head", "body"])
def test_half_a_request_is_given_up_in_words(hasty, data):
    with connect(hasty, data) as connection:
        answer = only_answer(connection)
    assert answer.status == 408
    assert "did not come in time" in answer.error()["message"]
    wait_until(lambda: load(hasty) == 0)


def test_a_silent_connection_is_closed(hasty):
    with connect(hasty) as connection:
        assert read_all(connection) == b""


def test_a_connection_between_requests_is_closed(hasty):
    with connect(hasty, b"GET /version HTTP/1.1\r\nHost: a\r\n\r\n") as connection:
        answer = only_answer(connection)
    assert answer.status == 200
    assert "connection" not in answer.headers  # it might have gone on


@pytest.mark.parametrize("data", [HALF_HEAD, HALF_BODY], ids=["head", "body"])
def test_a_byte_now_and_then_is_no_request(hasty, data):
    with connect(hasty, data) as connection:
        for _ in range(1000):  # each byte comes in time; at this rate a body of 8 MiB would take days
            if select.select([connection], [], [], 0.05)[0]:
                break
            connection.sendall(b"a")
        assert only_answer(connection).status == 408


def test_an_answer_may_take_longer_than_a_request(hasty):
    with connect(hasty, post(CHAT, HELLO | {"max_tokens": 4}, "Connection: close")) as connection:
        assert only_answer(connection).status == 200


def test_a_client_that_reads_nothing_is_given_up(tmp_path):
    """Also when the engine and the application have long finished and only the connection is left."""
    times = LONG_TIMES | {"idle_timeout_s": 0.2, "send_timeout_s": 0.2}
    with (
        running_server(tmp_path, ECHO, EchoConfig(), **times) as server,
        send(server, BULKY, receive_buffer=4096) as stuck,
    ):
        assert stuck.recv(1) == b"H"
        port = stuck.getsockname()[1]
        process = psutil.Process(server.process.pid)
        wait_until(lambda: not [c for c in process.net_connections() if c.raddr and c.raddr.port == port])
        assert b"[DONE]" not in read_all(stuck)


def test_whoever_comes_when_all_connections_are_in_use_is_told_so(tmp_path):
    with (
        running_server(tmp_path, ECHO, EchoConfig(), max_connections=4, **LONG_TIMES) as server,
        contextlib.ExitStack() as stack,
    ):
        busy = connect_all(stack, server, HALF_HEAD, 4)
        for _ in range(20):
            with connect(server, b"GET /version HTTP/1.1\r\nHost: a\r\n\r\n") as connection:
                answer = only_answer(connection)
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            assert "All 4 connections" in answer.error()["message"]
        assert not any(map(is_closed, busy))
        assert server.log.count("all 4 connections are in use") == 1
        busy[0].close()
        wait_until(lambda: _status(server) == 200)


def _status(server: RunningServer) -> int:
    """0 if the connection is one of too many even to be answered."""
    with server.http() as http, contextlib.suppress(httpx.TransportError):
        return http.get("/version").status_code
    return 0


def test_connections_without_a_request_make_room_for_others(tmp_path):
    with (
        running_server(tmp_path, ECHO, EchoConfig(), max_connections=4, **LONG_TIMES) as server,
        contextlib.ExitStack() as stack,
    ):
        (busy,) = connect_all(stack, server, HALF_HEAD, 1)
        silent = connect_all(stack, server, b"", 40)
        wait_until(lambda: _status(server) == 200)
        wait_until(lambda: sum(map(is_closed, silent)) >= 37)
        assert not is_closed(busy)


def test_few_descriptors_are_a_limit_and_not_a_failure(tmp_path):
    """As after `ulimit -n 64`: more connections than there could be descriptors. Some beyond the limit are answered."""

    with (
        running_server(tmp_path, ECHO, EchoConfig(), descriptors=(64, 64), **LONG_TIMES) as server,
        contextlib.ExitStack() as stack,
    ):
        connections = connect_all(stack, server, HALF_HEAD, 100)
        refused = []
        while 503 not in refused:
            wait_until(lambda: any(map(is_closed, connections)))
            for connection in list(filter(is_closed, connections)):
                refused += [answer.status for answer in answers(read_all(connection))] or [0]
                connection.close()
                connections.remove(connection)
        assert set(refused) <= {503, 0}
        assert "connections are in use" in server.log
        assert "Traceback" not in server.log
        for connection in connections:
            connection.close()
        wait_until(lambda: _status(server) == 200)


def test_the_limit_of_descriptors_is_raised(tmp_path):
    with (
        running_server(tmp_path, ECHO, EchoConfig(), descriptors=(40, 300), **LONG_TIMES) as server,
        contextlib.ExitStack() as stack,
    ):
        connections = connect_all(stack, server, HALF_HEAD, 150)
        assert _status(server) == 200
        assert not any(map(is_closed, connections))


def test_more_connections_than_descriptors_are_an_error_at_start(tmp_path):
    with pytest.raises(RuntimeError), running_server(tmp_path, ECHO, EchoConfig(), max_connections=2**24):
        pass
    assert "no room for --max-connections 16777216" in (tmp_path / "stderr").read_text()


@pytest.mark.parametrize("data", [HALF_HEAD, HALF_BODY], ids=["head", "body"])
def test_half_a_request_does_not_delay_a_shutdown(tmp_path, data):
    with running_server(tmp_path, ECHO, SLOW, grace_period_s=LONG_S, **LONG_TIMES) as server:
        with connect(server, data) as connection, server.http() as http:
            if data == HALF_BODY:
                wait_until(lambda: http.get("/load").json()["server_load"] == 1)
            else:
                assert http.get("/version").status_code == 200
            server.process.send_signal(signal.SIGTERM)
            answer = only_answer(connection)
        assert (answer.status, answer.headers["retry-after"]) == (503, "5")
        assert "shutting down" in answer.error()["message"]
        assert server.process.wait(30) == 0


def test_what_is_being_answered_when_a_shutdown_begins_is_its_connections_last(tmp_path):
    with running_server(tmp_path, ECHO, SLOW, grace_period_s=LONG_S, **LONG_TIMES) as server:
        with connect(server, post(CHAT, HELLO | {"max_tokens": 100})) as connection, connect(server) as silent:
            wait_until(lambda: load(server) == 1)
            server.process.send_signal(signal.SIGTERM)
            answer = only_answer(connection)
            assert (answer.status, answer.headers["connection"]) == (200, "close")
            assert read_all(silent) == b""
        assert server.process.wait(30) == 0


@pytest.mark.parametrize("how", ["close", "reset", "half-close, then close"])
@pytest.mark.parametrize("begun", [True, False], ids=["streamed", "not-begun"])
def test_a_client_that_has_gone_is_noticed_however_it_went(slow, begun, how):
    with connect(slow, post(CHAT, LONG | {"max_tokens": 10_000, "stream": begun})) as connection:
        wait_until(lambda: running(slow) == 1)
        if begun:
            assert connection.recv(1) == b"H"
        if how == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        if how.startswith("half"):
            connection.shutdown(socket.SHUT_WR)
    wait_until(lambda: load(slow) == 0)
    wait_until(lambda: running(slow) == 0)
