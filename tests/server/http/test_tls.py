"""HTTPS on the server's own port, with certificates that the test makes."""

from __future__ import annotations

import asyncio
import http.client
import signal
import socket
import ssl
import threading
from collections.abc import Iterator

import httpx
import openai
import pytest

from server.http import tls
from server.http.tls import TlsContext, server_context
from server.settings import TlsFiles
from tests.server.http.test_connection_limits import LONG_TIMES
from tests.server.support.authority import Authority
from tests.server.support.echo_engine import EchoConfig
from tests.server.support.raw_http import TIMEOUT_S, Answer, answers, connect, post, read_all
from tests.server.support.requests import BULKY, CHAT, HELLO, LONG, SLOW, wait_until
from tests.server.support.running import ECHO, RunningServer, running_server

pytestmark = pytest.mark.slow

VERSION = b"GET /version HTTP/1.1\r\nHost: a\r\n\r\n"
CLIENT_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"  # and 501 bytes that do not come
PASSWORD = "open sesame"


@pytest.fixture(scope="module")
def authority(tmp_path_factory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "authority")


@pytest.fixture(scope="module")
def secure(tmp_path_factory, authority) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("secure"), ECHO, SLOW, tls=authority.files("server")) as server:
        yield server
        assert "Traceback" not in server.log


def shake_hands(server: RunningServer, context: ssl.SSLContext, data: bytes = b"") -> ssl.SSLSocket:
    connection = context.wrap_socket(connect(server), server_hostname="127.0.0.1")
    connection.sendall(data)
    return connection


def next_status(connection: ssl.SSLSocket) -> int:
    """Reads one answer of a connection that goes on."""
    response = http.client.HTTPResponse(connection)
    response.begin()
    response.read()
    return response.status


def answer_to_the_mark(connection: ssl.SSLSocket, size: int = 65536) -> Answer:
    """The connection's last answer. The mark of the end is checked: `recv` raises where it is missing."""
    (answer,) = answers(b"".join(iter(lambda: connection.recv(size), b"")))
    return answer


def load(server: RunningServer, context: ssl.SSLContext) -> int:
    with server.http(verify=context) as web:
        return web.get("/load").json()["server_load"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_official_client_over_https(secure, authority, stream):
    assert secure.url.startswith("https://")
    with httpx.Client(verify=authority.context()) as web:
        client = secure.client(http_client=web)
        answer = client.chat.completions.create(model="alias", max_tokens=20, stream=stream, **HELLO)
        if stream:
            text = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
        else:
            text = answer.choices[0].message.content
    assert text == "abcdefghijabcdefghij"[: len(text)] and text


def test_a_client_that_does_not_know_the_authority_refuses(secure, authority):
    with httpx.Client() as web, pytest.raises(openai.APIConnectionError):
        secure.client(http_client=web).models.list()
    with secure.http(verify=authority.context()) as web:
        assert web.get("/health").status_code == 200


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_connection_serves_many_requests_and_ends_with_a_mark(secure, authority, version):
    context = authority.context()
    context.minimum_version = context.maximum_version = version
    context.set_alpn_protocols(["h2", "http/1.1"])
    with shake_hands(secure, context) as connection:
        assert connection.selected_alpn_protocol() == "http/1.1"
        for _ in range(3):
            connection.sendall(VERSION)
            assert next_status(connection) == 200
        connection.sendall(VERSION.replace(b"Host", b"Connection: close\r\nHost"))
        answer = answer_to_the_mark(connection)
    assert (answer.status, answer.headers["connection"]) == (200, "close")


def test_the_ciphers_of_tls_1_2_can_be_chosen(tmp_path, authority):
    only = "ECDHE-RSA-AES256-GCM-SHA384:ECDHE-ECDSA-AES256-GCM-SHA384"
    context, other = authority.context(), authority.context()
    context.maximum_version = other.maximum_version = ssl.TLSVersion.TLSv1_2
    other.set_ciphers("ECDHE+CHACHA20")
    with running_server(tmp_path, ECHO, EchoConfig(), tls=authority.files("picky", ciphers=only)) as server:
        with shake_hands(server, context) as connection:
            assert connection.cipher()[0] in only.split(":")
        with pytest.raises(ssl.SSLError):
            shake_hands(server, other)


def test_large_bodies_and_large_answers(secure, authority):
    with secure.http(verify=authority.context()) as web:
        body = {"tokens": list(range(32, 120)) * 1000}
        text = web.post("/detokenize", json=body).json()["prompt"]
        assert len(text) == len(body["tokens"])
        assert web.post(CHAT, content=b" " * (9 << 20)).status_code == 413


def test_an_answer_larger_than_the_sockets_buffers(tmp_path, authority):
    """The client reads it late, and in small pieces."""
    files = authority.files("bulky")
    with running_server(tmp_path, ECHO, EchoConfig(), tls=files) as server:
        body = post(CHAT, BULKY | {"max_tokens": 400}, "Connection: close")
        with shake_hands(server, authority.context(), body) as connection:
            wait_until(lambda: load(server, authority.context()) == 1)
            answer = answer_to_the_mark(connection, 3000)
    assert answer.body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("data", [b"\x00" * 100, b"SSH-2.0-OpenSSH\r\n", CLIENT_HELLO + b"\xff" * 3000], ids=str)
def test_bytes_that_are_not_tls_close_the_connection(secure, authority, data):
    with connect(secure, data) as connection:
        assert len(read_all(connection)) < 300  # an alert at most
    assert load(secure, authority.context()) == 0


def test_garbage_after_the_handshake_closes_the_connection(secure, authority):
    with shake_hands(secure, authority.context(), VERSION) as connection:
        assert next_status(connection) == 200
        raw = socket.socket(fileno=connection.detach())
    with raw:
        raw.settimeout(TIMEOUT_S)
        raw.sendall(b"\x17\x03\x03\x00\x20" + b"\xff" * 32)
        read_all(raw)


@pytest.mark.parametrize("data", [b"", CLIENT_HELLO], ids=["silent", "half a handshake"])
def test_a_client_that_stalls_in_the_handshake_is_closed(tmp_path, authority, data):
    times = LONG_TIMES | {"head_timeout_s": 1.0}
    with running_server(tmp_path, ECHO, EchoConfig(), tls=authority.files("hasty"), **times) as server:
        with connect(server, data) as connection:
            assert read_all(connection) == b""
        with connect(server, CLIENT_HELLO):
            pass  # closed in mid-handshake
        assert load(server, authority.context()) == 0
        assert "Traceback" not in server.log


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_is_noticed(secure, authority, stream):
    context = authority.context()
    with shake_hands(secure, context, post(CHAT, LONG | {"stream": stream})) as connection:
        wait_until(lambda: load(secure, context) == 1)
        if stream:
            assert connection.recv(1) == b"H"
    wait_until(lambda: load(secure, context) == 0)


def test_clients_must_show_a_certificate(tmp_path, authority):
    own, foreign = authority.files("client"), Authority(tmp_path / "foreign").files("client")
    files = authority.files("strict", ca_certs=authority.file, cert_reqs=2)
    with running_server(tmp_path, ECHO, EchoConfig(), tls=files) as server:
        with server.http(verify=authority.context(own)) as web:
            assert web.get("/health").status_code == 200
        for context in (authority.context(), authority.context(foreign)):
            with server.http(verify=context) as web, pytest.raises(httpx.TransportError):
                web.get("/health")
        assert "Traceback" not in server.log


def test_a_shutdown_finishes_what_runs(tmp_path, authority):
    context = authority.context()
    with running_server(tmp_path, ECHO, SLOW, tls=authority.files("ending"), **LONG_TIMES) as server:
        request = post(CHAT, HELLO | {"max_tokens": 100, "ignore_eos": True})
        with shake_hands(server, context, request) as connection, connect(server, CLIENT_HELLO) as stalled:
            wait_until(lambda: load(server, context) == 1)
            with shake_hands(server, context) as silent:
                server.process.send_signal(signal.SIGTERM)
                assert answer_to_the_mark(connection).status == 200
                assert silent.recv(1) == b""
            assert read_all(stalled) == b""
        assert server.process.wait(30) == 0
        assert "Traceback" not in server.log


def serial_number(server: RunningServer, context: ssl.SSLContext) -> str:
    with shake_hands(server, context) as connection:
        return connection.getpeercert()["serialNumber"]


def test_changed_files_are_loaded_without_dropping_connections(tmp_path, authority):
    """First a certificate without its key, then the key, then a certificate that cannot be read."""
    files, others = authority.files("before", refresh=True), authority.files("after")
    context = authority.context()
    with running_server(tmp_path, ECHO, EchoConfig(), tls=files, **LONG_TIMES) as server:
        with shake_hands(server, context) as connection:
            before = connection.getpeercert()["serialNumber"]
            others.certfile.replace(files.certfile)
            wait_until(lambda: "the key does not match" in server.log)
            assert serial_number(server, context) == before
            others.keyfile.replace(files.keyfile)
            wait_until(lambda: serial_number(server, context) != before)
            connection.sendall(VERSION)
            assert next_status(connection) == 200
        after = serial_number(server, context)
        files.certfile.write_text("nothing")
        wait_until(lambda: "there is no certificate" in server.log)
        assert serial_number(server, context) == after
        assert "Traceback" not in server.log


def test_changed_files_are_loaded_where_no_handshake_is_under_way(authority, monkeypatch):
    """A context has a new certificate without its key for a moment. Handshakes are made on the event loop's thread."""
    files, others = authority.files("first", refresh=True), authority.files("second")
    context, load_key, threads = TlsContext(files), tls._load_key, []

    def noted(into: ssl.SSLContext, of: TlsFiles) -> None:
        if into is context.context:
            threads.append(threading.current_thread())
        load_key(into, of)

    async def change() -> None:
        async with context.refreshed():
            others.certfile.replace(files.certfile)
            others.keyfile.replace(files.keyfile)
            while not threads:
                await asyncio.sleep(0.01)

    monkeypatch.setattr(tls, "_load_key", noted)
    asyncio.run(change())
    assert threads == [threading.main_thread()]


def test_files_are_left_alone_without_the_setting(authority):
    contexts = TlsContext(authority.files("fixed"))

    async def tasks() -> int:
        async with contexts.refreshed():
            return len(asyncio.all_tasks())

    assert asyncio.run(tasks()) == 1


def test_files_that_cannot_be_used_are_named_with_their_flag(tmp_path, authority):
    good, other = authority.files("good"), authority.files("other")
    garbage, encrypted = tmp_path / "garbage", tmp_path / "encrypted"
    garbage.write_text("nothing")
    encrypted.write_bytes(_encrypted(good.keyfile.read_bytes()))
    for options, words in (
        ({"certfile": tmp_path / "none"}, "--ssl-certfile .*none: No such file"),
        ({"certfile": garbage}, "--ssl-certfile .*garbage: there is no certificate"),
        ({"certfile": good.certfile}, "--ssl-certfile .*: there is no private key .*; --ssl-keyfile names"),
        ({"certfile": good.certfile, "keyfile": tmp_path / "none"}, "--ssl-keyfile .*none: No such file"),
        ({"certfile": good.certfile, "keyfile": garbage}, "--ssl-keyfile .*garbage: there is no private key"),
        ({"certfile": good.certfile, "keyfile": other.keyfile}, "--ssl-keyfile .*: the key does not match"),
        ({"certfile": good.certfile, "keyfile": encrypted}, "--ssl-keyfile .*: the key is encrypted"),
        (
            {"certfile": good.certfile, "keyfile": encrypted, "keyfile_password": "wrong"},
            "--ssl-keyfile-password does not open",
        ),
        ({"certfile": good.certfile, "keyfile": good.keyfile, "ca_certs": garbage}, "--ssl-ca-certs .*garbage"),
        ({"certfile": good.certfile, "keyfile": good.keyfile, "ciphers": "ROT13"}, "--ssl-ciphers 'ROT13'"),
    ):
        with pytest.raises(ValueError, match=words):
            server_context(TlsFiles(**options))
    server_context(TlsFiles(certfile=good.certfile, keyfile=encrypted, keyfile_password=PASSWORD))
    with pytest.raises(ValueError, match="needs --ssl-ca-certs"):
        TlsFiles(certfile=good.certfile, cert_reqs=2)


def _encrypted(key: bytes) -> bytes:
    from cryptography.hazmat.primitives import serialization

    private = serialization.load_pem_private_key(key, None)
    return private.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(PASSWORD.encode()),
    )
