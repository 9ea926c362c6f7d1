"""What a client may send: heads, trailers, framing and requests ahead of time, before and after a key was asked for."""

from __future__ import annotations

import random
import socket

import psutil
import pytest

from tests.server.support.echo_engine import EchoConfig
from tests.server.support.raw_http import answers, connect, only_answer, post, read_all
from tests.server.support.requests import CHAT, HELLO, wait_until
from tests.server.support.running import ECHO, RunningServer, running_server, server_of

SHORT = HELLO | {"max_tokens": 3}
CHUNKED = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
GET = b"GET /version HTTP/1.1\r\nHost: a\r\n\r\n"
MIB = 2**20


# Clients here read to the end of their connections, which may wait for another request.
open_server = server_of(EchoConfig(), idle_timeout_s=2.0)


keyed = server_of(EchoConfig(), idle_timeout_s=2.0, api_keys=("sk-1",))


@pytest.fixture(params=["open_server", "keyed"])
def server(request) -> RunningServer:
    return request.getfixturevalue(request.param)


def send_until_stopped(connection: socket.socket, piece: bytes, num_bytes: int) -> int:
    """How much of `num_bytes` went out before the server closed."""
    sent = 0
    try:
        while sent < num_bytes:
            sent += connection.send(piece)
    except ConnectionError:
        pass
    return sent


@pytest.mark.parametrize(
    ("beginning", "piece"),
    [
        (CHUNKED + b"1\r\n{\r\n0\r\n", b"a: b\r\n" * 10_000),
        (CHUNKED + b"1\r\n{\r\n0\r\nX-Long: ", b"a" * 60_000),
        (CHUNKED + b"1\r\n{\r\n0\r\n", b"a" * 60_000),
        (CHUNKED + b"1;", b"a" * 60_000),
        (b"GET /", b"a" * 60_000),
        (b"GET /version HTTP/1.1\r\nX-Long: ", b"a" * 60_000),
        (b"GET /version HTTP/1.1\r\n", b"a: b\r\n" * 10_000),
        (b"\r\n", b"\r\n" * 30_000),
        (GET, GET * 1000),
    ],
    ids=["trailers", "trailer", "trailer-name", "extension", "path", "field", "fields", "empty-lines", "requests"],
)
def test_what_has_no_end_is_cut_off_and_takes_no_memory(server, beginning, piece):
    process = psutil.Process(server.process.pid)
    before = process.memory_info().rss
    with connect(server, beginning) as connection:
        assert send_until_stopped(connection, piece, 64 * MIB) < 16 * MIB  # the systems' buffers hold some
    assert process.memory_info().rss < before + 16 * MIB
    with server.http() as http:
        assert http.get("/health").status_code == 200


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /version HTTP/1.1\r\n" + b"a: b\r\n" * 257 + b"\r\n",
        b"GET /version HTTP/1.1\r\na: " + b"b" * 66_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 66_000 + b" HTTP/1.1\r\n\r\n",
    ],
    ids=["fields", "field", "path"],
)
def test_a_head_that_is_too_long_is_refused_however_it_comes(open_server, request_bytes):
    with connect(open_server, request_bytes) as connection:
        answer = only_answer(connection)
    assert answer.status == 400
    assert answer.error()["type"] == "BadRequestError"


def test_trailers_are_read_and_are_no_headers(keyed):
    body = b'{"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}'
    head = CHUNKED.replace(b"Host: a\r\n", b"Host: a\r\nAuthorization: Bearer sk-1\r\n")
    chunk = b"%x;ext=1\r\n%b\r\n0\r\nAuthorization: Bearer sk-1\r\n\r\n" % (len(body), body)
    with connect(keyed, head + chunk + GET) as connection:
        assert [answer.status for answer in answers(read_all(connection))] == [200]
    with connect(keyed, CHUNKED + chunk) as connection:
        connection.shutdown(socket.SHUT_WR)
        assert answers(read_all(connection))[-1].status == 401


def test_a_request_that_comes_before_its_turn_is_not_answered(open_server):
    with connect(open_server, GET + GET) as connection:
        answer = only_answer(connection)
    assert (answer.status, answer.headers["connection"]) == (200, "close")


def test_what_follows_a_request_does_not_disturb_its_streamed_answer(slow):
    with connect(slow, post(CHAT, SHORT | {"max_tokens": 10, "stream": True})) as connection:
        data = connection.recv(1)
        connection.sendall(b"\x00 this is not HTTP\r\n\r\n")
        (answer,) = answers(data + read_all(connection))
    assert answer.status == 200
    assert answer.body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("path", "status"), [(CHAT, 401), ("/nowhere", 401), ("/health", 405)], ids=["chat", "nowhere", "health"]
)
def test_a_refusal_does_not_wait_for_the_body(keyed, path, status):
    with connect(keyed, f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\n{{".encode()) as connection:
        assert only_answer(connection).status == status


def test_a_refused_client_that_sends_on_gets_the_refusal(keyed):
    """Closing with bytes unread would reset the connection, and the answer could be lost with it."""
    body = b"a" * 500_000
    head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with connect(keyed, head) as connection:
        for start in range(0, len(body), 50_000):
            connection.sendall(body[start : start + 50_000])
        assert only_answer(connection).status == 401


def test_a_body_that_is_announced_as_too_large_is_not_waited_for(open_server):
    head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {9 * MIB}\r\n\r\n"
    with connect(open_server, head.encode()) as connection:
        assert only_answer(connection).status == 413


@pytest.mark.parametrize(
    "fields",
    [
        ("Upgrade: h2c", "Connection: Upgrade, HTTP2-Settings", "HTTP2-Settings: AAMAAABk"),
        ("Upgrade: websocket", "Connection: keep-alive, Upgrade"),
    ],
    ids=["h2c", "websocket"],
)
def test_a_wish_for_another_protocol_is_ignored(open_server, fields):
    with connect(open_server, post(CHAT, SHORT, *fields)) as connection:
        head = connection.recv(12)
        assert head == b"HTTP/1.1 200"
        connection.settimeout(None)
        while not head.endswith(b"}"):
            head += connection.recv(65536)
        connection.sendall(GET.replace(b"Host: a\r\n", b"Host: a\r\nConnection: close\r\n"))  # as if nothing had been
        assert only_answer(connection).status == 200


def test_a_body_after_such_a_wish_may_come_in_pieces(open_server):
    head, _, body = post(CHAT, SHORT, "Upgrade: h2c", "Connection: Upgrade, close").partition(b"\r\n\r\n")
    with connect(open_server, head[:-5]) as connection:
        for piece in (head[-5:] + b"\r\n\r\n", body[:10], body[10:]):
            connection.sendall(piece)
        assert only_answer(connection).status == 200


def test_a_tunnel_is_refused(open_server):
    with connect(open_server, b"CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n") as connection:
        assert only_answer(connection).status in (400, 405)


def test_a_slash_too_many_leads_nowhere(open_server):
    with connect(
        open_server, b"GET /metrics/ HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n"
    ) as connection:
        data = read_all(connection)
    assert answers(data)[0].status == 404
    assert b"evil" not in data


def test_bad_requests_cost_one_line_of_the_log(tmp_path):
    bad = [
        b"\x00\xff\r\n\r\n",
        post(CHAT, SHORT, "Upgrade: h2c", "Connection: Upgrade"),
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 300,
    ]
    with running_server(tmp_path, ECHO, EchoConfig()) as server:
        for data in bad * 10:
            with connect(server, data) as connection:
                connection.shutdown(socket.SHUT_WR)
                read_all(connection)
        assert 1 <= len(server.log.splitlines()) <= 4  # one of each kind, in the interval of the log


def test_no_bytes_make_the_server_fail(tmp_path):
    """Requests with bytes changed, cut and doubled: every one is answered or closed, and nothing is raised."""
    rng = random.Random(0)
    seeds = [
        post(CHAT, SHORT, "X-Request-Id: a\xe9"),
        post(CHAT, SHORT | {"stream": True}, "Upgrade: h2c", "Connection: Upgrade"),
        CHUNKED + b"2;a=b\r\n{}\r\n0\r\na: b\r\n\r\n",
        GET.replace(b"Host: a", b"Host: [\xff"),
        b"GET http://[::1/%ff?%00#a HTTP/1.1\r\nHost: [\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: a\r\nOrigin: x\r\nAccess-Control-Request-Method: GET\r\n\r\n",
        b"HEAD /metrics?a=%zz HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
    ]
    with running_server(tmp_path, ECHO, EchoConfig(), body_timeout_s=5.0) as server:
        for _ in range(300):
            data = bytearray(rng.choice(seeds))
            for _ in range(rng.randint(0, 3)):
                at = rng.randrange(len(data))
                data[at : at + rng.randint(0, 3)] = rng.choice([b"\r\n", b"\x00", b":", b" ", b"%", bytes(data[:at])])
            with connect(server, bytes(data)) as connection:
                connection.shutdown(socket.SHUT_WR)
                read_all(connection)
        assert "Traceback" not in server.log
        with server.http() as http:
            assert http.post(CHAT, json=SHORT).status_code == 200
            wait_until(lambda: http.get("/load").json()["server_load"] == 0)
