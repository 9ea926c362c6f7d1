"""How a server of several HTTP processes starts and ends. Each test starts a server."""

from __future__ import annotations

import signal
import socket
import subprocess
from dataclasses import replace

import httpx
import pytest

from server.settings import Settings
from tests.server.support.api_processes import http_processes, through_each
from tests.server.support.echo_engine import EchoConfig
from tests.server.support.requests import CHAT, HELLO, SLOW, wait_until
from tests.server.support.running import ECHO, RunningServer, running_server, spawn
from tests.server.support.tokenizers import write_folder
from tests.server.test_group import ADMIN, CHANGING, by_engine, prompt
from tests.server.test_lifecycle import Stream, alive, descendants

pytestmark = pytest.mark.hosts


def test_the_engine_that_is_killed_ends_all_streams(tmp_path):
    with running_server(tmp_path, ECHO, SLOW, api_server_count=2) as server:
        with through_each(server) as clients, through_each(server) as waiting:
            readers = [Stream(client) for client in clients]
            server.engine_process().kill()
            for reader in readers:
                assert "The engine has failed" in reader.end()[-1]["error"]["message"]
            for client in waiting:
                health = client.get("/health")
                assert health.status_code == 503
                assert "exit code -9" in health.json()["error"]["message"]
                assert client.post(CHAT, json=HELLO).status_code == 503
        assert server.process.wait(20) == 1


def test_a_signal_lets_the_requests_of_all_finish(tmp_path):
    path = tmp_path / "s"
    with running_server(tmp_path, ECHO, SLOW, api_server_count=3, uds=path) as server:
        children = descendants(server)
        clients = [httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://a") for _ in range(6)]
        waiting = clients.pop()
        assert waiting.get("/health").status_code == 200
        readers = [Stream(client, max_tokens=150) for client in clients]
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: waiting.get("/health").status_code == 503)
        wait_until(lambda: waiting.post(CHAT, json=HELLO).status_code == 503)  # by whichever process it reaches
        for reader in readers:
            assert reader.end()[-1]["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(20) == 0
        for client in [*clients, waiting]:
            client.close()
        wait_until(lambda: not any(alive(child) for child in children))
    assert not path.exists()


def test_a_second_signal_ends_the_wait(tmp_path):
    with running_server(tmp_path, ECHO, SLOW, api_server_count=2, grace_period_s=1000.0) as server:
        with through_each(server) as clients, through_each(server) as waiting:
            readers = [Stream(client) for client in clients]
            server.process.terminate()
            for client in waiting:
                wait_until(lambda client=client: client.get("/health").status_code == 503)
            server.process.terminate()
            assert all("error" in reader.end()[-1] for reader in readers)
        assert server.process.wait(20) == 0


def test_the_processes_end_with_a_parent_that_is_killed(tmp_path):
    with running_server(tmp_path, ECHO, SLOW, api_server_count=2) as server:
        children = descendants(server)
        server.process.kill()
        server.process.wait()
        wait_until(lambda: not any(alive(child) for child in children))


def test_both_processes_choose_among_the_engines_by_what_both_have_sent(tmp_path):
    long = "the beginning of a chat that both processes are sent, of more than one block of sixty-four tokens. " * 2
    body = {"messages": [{"role": "user", "content": long}], "max_tokens": 1, "ignore_eos": True}
    with (
        running_server(tmp_path, ECHO, SLOW, more_engines=(SLOW,), api_server_count=2) as server,
        through_each(server, 2) as clients,
        through_each(server, 2) as streaming,
    ):
        # Three streams by one process, then one by the other: by its own count alone, the fourth would go to engine 0.
        first, second = streaming
        readers = [Stream(first, **prompt(1))]
        wait_until(lambda: sum(by_engine(server, "num_requests_running").values()) == 1)
        readers.append(Stream(second, **prompt(2)))
        wait_until(lambda: by_engine(server, "num_requests_running") == {"0": 1.0, "1": 1.0})
        for _ in range(3):
            for client in clients:
                assert client.post(CHAT, json=body).status_code == 200
        wait_until(lambda: sorted(by_engine(server, "request_success_total").values()) == [0.0, 6.0])
        server.engine_processes()[1].kill()
        for client in clients:  # before the last stream ends, and with it the server
            wait_until(lambda client=client: client.get("/health").status_code == 503)
            assert "engine 1" in client.get("/health").json()["error"]["message"]
        ends = [reader.end()[-1] for reader in readers]
        assert all("error" in end for end in ends)
        assert server.process.wait(20) == 1


def test_engines_that_are_left_with_different_weights_end_all(tmp_path):
    second = replace(CHANGING, uncommittable=("bad",))
    options = {"more_engines": (second,), "admin_api_keys": ("boss",), "api_server_count": 2}
    with (
        running_server(tmp_path, ECHO, CHANGING, **options) as server,
        through_each(server, 2, headers=ADMIN) as clients,
    ):
        assert clients[1].post("/admin/reload", json={"model": "bad"}).status_code == 400
        for client in clients:
            wait_until(lambda client=client: client.get("/health").status_code == 503)
            assert "not all engines have made the change: engine 1: no model bad" in client.get("/health").text
        assert server.process.wait(30) == 1


def failure(settings: Settings, config: EchoConfig, expected: int = 1) -> str:
    """What a server that cannot start says."""
    process = spawn(settings, ECHO, config, stderr=subprocess.PIPE)
    try:
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == expected
    assert "ready" not in out
    return out + err


def test_an_engine_that_cannot_start(tmp_path):
    settings = Settings(tokenizer_folder=write_folder(tmp_path), model_names=("m",), port=0, api_server_count=2)
    assert "The engine could not start: no room" in failure(settings, EchoConfig(fail_at_start="no room"))


def test_a_fault_of_the_settings_is_said_once_while_the_engine_loads(tmp_path):
    folder = write_folder(tmp_path, template="{% for %}")
    settings = Settings(tokenizer_folder=folder, model_names=("m",), port=0, api_server_count=2)
    said = failure(settings, EchoConfig(start_s=1000.0))
    assert said.count("ValueError: The chat template is not valid") == 1


def test_a_port_that_is_taken(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        folder = write_folder(tmp_path)
        settings = Settings(tokenizer_folder=folder, model_names=("m",), port=port, api_server_count=2)
        assert "Address already in use" in failure(settings, EchoConfig())


def test_a_process_that_dies_before_it_is_ready_ends_the_server(tmp_path):
    settings = Settings(tokenizer_folder=write_folder(tmp_path), model_names=("m",), port=0, api_server_count=2)
    process = spawn(settings, ECHO, EchoConfig(start_s=1000.0), stderr=subprocess.PIPE)
    server = RunningServer(process)
    wait_until(lambda: len(server.engine_processes()) == 3)
    http_processes(server)[1].kill()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "HTTP process 1 has ended (exit code -9) before it was ready" in out + err


def test_a_number_of_processes_that_makes_no_sense_is_refused(tmp_path):
    for count, limit in ((0, "at least 1"), (-1, "at least 1"), (65, "at most 64")):
        with pytest.raises(ValueError, match=f"--api-server-count must be {limit}, not {count}"):
            Settings(tokenizer_folder=tmp_path, model_names=("m",), api_server_count=count)
