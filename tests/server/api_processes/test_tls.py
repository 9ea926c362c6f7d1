"""HTTPS in front of several HTTP processes: each has the certificate, and each sees that it has changed."""

from __future__ import annotations

import contextlib
import signal
import ssl
from collections.abc import Iterator

import httpx
import pytest

from server.settings import TlsFiles
from tests.server.support.api_processes import http_processes, through_each
from tests.server.support.authority import Authority
from tests.server.support.requests import CHAT, HELLO, LONG, SLOW, wait_until
from tests.server.support.running import ECHO, RunningServer, running_server
from tests.server.test_lifecycle import Stream

pytestmark = pytest.mark.hosts

RESPONSES = "/v1/responses"
SHORT = HELLO | {"max_tokens": 12, "ignore_eos": True}
TEXT = "abcdefghijab"


@pytest.fixture(scope="module")
def authority(tmp_path_factory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "authority")


@pytest.fixture(scope="module")
def files(authority) -> TlsFiles:
    return authority.files("several", refresh=True)


@pytest.fixture(scope="module")
def server(tmp_path_factory, files) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("secure"), ECHO, SLOW, api_server_count=2, tls=files) as running:
        yield running
        assert "Traceback" not in running.log


@pytest.fixture
def context(authority) -> ssl.SSLContext:
    return authority.context()


def serial_number(client: httpx.Client) -> str:
    """Of the certificate that the client's connection was opened with."""
    answer = client.get("/live")
    assert answer.status_code == 200
    return answer.extensions["network_stream"].get_extra_info("ssl_object").getpeercert()["serialNumber"]


def serial_numbers(server: RunningServer, context: ssl.SSLContext) -> list[str]:
    """Those that each process shows to a new client."""
    with through_each(server, verify=context) as clients:
        return [serial_number(client) for client in clients]


def test_the_processes_serve_as_one(server, context):
    assert server.url.startswith("https://")
    with through_each(server, verify=context) as (first, second), server.http(verify=context) as other:
        for http in (first, second):
            client = server.client(http_client=http)
            options = {"model": "alias", "max_tokens": len(TEXT), "extra_body": {"ignore_eos": True}, **HELLO}
            assert client.chat.completions.create(**options).choices[0].message.content == TEXT
            stream = client.chat.completions.create(**options, stream=True)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == TEXT
        made = first.post(RESPONSES, json={"input": "hello", "max_output_tokens": 4}).json()
        assert second.get(f"{RESPONSES}/{made['id']}").json() == made
        with first.stream("POST", CHAT, json=LONG) as one, second.stream("POST", CHAT, json=LONG) as another:
            assert one.status_code == another.status_code == 200
            assert other.get("/load").json() == {"server_load": 2}
        wait_until(lambda: other.get("/load").json() == {"server_load": 0})


def test_changed_files_reach_each_process_and_a_process_that_starts_again(server, authority, files, context):
    """A process that dies while the files cannot be used comes back when they can. The other serves meanwhile."""
    (before,) = set(serial_numbers(server, context))
    others = authority.files("after")
    with through_each(server, verify=context) as old, through_each(server, verify=context) as streaming:
        readers = [Stream(client, max_tokens=300) for client in streaming]
        others.certfile.replace(files.certfile)
        wait_until(lambda: server.log.count("the key does not match") == 2)
        assert serial_numbers(server, context) == [before, before]
        others.keyfile.replace(files.keyfile)
        wait_until(lambda: before not in serial_numbers(server, context))
        (after,) = set(serial_numbers(server, context))
        assert after != before
        assert [serial_number(client) for client in old] == [before, before]
        for reader in readers:
            assert reader.end()[-1]["choices"][0]["finish_reason"] == "length"

    certificate = files.certfile.read_bytes()
    files.certfile.write_text("nothing")
    wait_until(lambda: server.log.count("there is no certificate") == 2)
    with contextlib.ExitStack() as stack:
        kept, _ = stack.enter_context(through_each(server, verify=context))
        stay, killed = http_processes(server)
        killed.kill()
        wait_until(lambda: "waits for TLS files that can be used" in server.log)
        assert serial_number(kept) == after
        assert http_processes(server)[0] == stay
        files.certfile.write_bytes(certificate)
        wait_until(lambda: set(serial_numbers(server, context)) == {after})
        assert serial_number(kept) == after
    assert server.process.poll() is None


def test_a_unix_socket_with_certificates_of_clients_finishes_what_runs(tmp_path, authority):
    path = tmp_path / "s"
    strict = authority.files("strict", ca_certs=authority.file, cert_reqs=2)
    own = authority.files("client")

    def client(context: ssl.SSLContext) -> httpx.Client:
        transport = httpx.HTTPTransport(uds=str(path), verify=context)
        return httpx.Client(transport=transport, base_url="https://127.0.0.1", timeout=60)

    with running_server(tmp_path, ECHO, SLOW, api_server_count=2, uds=path, tls=strict) as server:
        assert server.url == f"unix:{path}"
        with client(authority.context()) as stranger, pytest.raises(httpx.TransportError):
            stranger.get("/health")
        clients = [client(authority.context(own)) for _ in range(4)]
        for known in clients:
            assert known.post(CHAT, json=SHORT).json()["choices"][0]["message"]["content"] == TEXT
        readers = [Stream(known, max_tokens=50) for known in clients]
        server.process.send_signal(signal.SIGTERM)
        for reader in readers:
            assert reader.end()[-1]["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(20) == 0
        for known in clients:
            known.close()
        assert "Traceback" not in server.log
    assert not path.exists()
