"""Starting, ending and dying, with real processes and real signals."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator

import httpx
import psutil
import pytest

from server.settings import Settings
from tests.server.support.echo_engine import EchoConfig
from tests.server.support.requests import CHAT, HELLO, LONG, SLOW, wait_until
from tests.server.support.running import ECHO, RunningServer, running_server, spawn
from tests.server.support.sse_events import parse_events
from tests.server.support.tokenizers import write_folder


class Stream:
    """A streamed request that is being read in a thread."""

    def __init__(self, server: RunningServer | httpx.Client, **fields: object) -> None:
        """Of a client of the test, or of one that ends with the stream."""
        client = server.http() if isinstance(server, RunningServer) else contextlib.nullcontext(server)
        self.status = 0
        self.text = ""
        self.begun = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(client, LONG | fields))
        self._thread.start()
        assert self.begun.wait(30)

    def _read(self, client: contextlib.AbstractContextManager[httpx.Client], body: dict[str, object]) -> None:
        with client as http, http.stream("POST", CHAT, json=body) as response:
            self.status = response.status_code
            for piece in response.iter_text():
                self.text += piece
                self.begun.set()
        self.begun.set()

    def end(self) -> list[dict]:
        """Its events, once it has ended."""
        self._thread.join(30)
        assert not self._thread.is_alive()
        return parse_events(self.text)


def descendants(server: RunningServer) -> list[psutil.Process]:
    return psutil.Process(server.process.pid).children(recursive=True)


def alive(process: psutil.Process) -> bool:
    """Not counting what has ended and waits to be reaped by whoever inherited it."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it has ended between the two questions
        return False


@pytest.fixture
def server(tmp_path) -> Iterator[RunningServer]:
    with running_server(tmp_path, ECHO, SLOW) as running:
        yield running


def test_what_the_engine_reports_is_passed_on(server):
    assert server.lines[0] == "report: the echo engine is loading"


def test_killed_engine(server):
    """kill -9: streams get an error event, /health says why, and the server ends with a failure's code."""
    stream = Stream(server)
    waiting = httpx.Client(base_url=server.url, timeout=30)
    server.engine_process().kill()
    *chunks, last = stream.end()
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert last["error"]["type"] == "InternalServerError"
    assert "engine" in last["error"]["message"]
    health = waiting.get("/health")
    assert health.status_code == 503
    assert "exit code -9" in health.json()["error"]["message"]
    assert waiting.post(CHAT, json=HELLO).status_code == 503
    assert "engine_alive{" in waiting.get("/metrics").text
    waiting.close()
    assert server.process.wait(20) == 1


def test_an_answer_that_is_not_streamed_fails_with_the_engine(server):
    def kill_when_running() -> None:
        with server.http() as http:
            wait_until(lambda: http.get("/load").json()["server_load"] == 1)
        server.engine_process().kill()

    killer = threading.Thread(target=kill_when_running)
    killer.start()
    response = server.post(CHAT, LONG | {"stream": False})
    killer.join()
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "InternalServerError"


def test_an_engine_that_dies_by_itself(tmp_path):
    config = EchoConfig(reply=tuple(b"abc"), step_s=0.01, die_after_tokens=100)
    with running_server(tmp_path, ECHO, config) as server:
        last = Stream(server).end()[-1]
        assert "the device has gone" in last["error"]["message"]
        assert server.process.wait(20) == 1


def test_the_engine_ends_with_a_server_that_is_killed(server):
    engine = server.engine_process()
    server.process.kill()
    server.process.wait()
    wait_until(lambda: not alive(engine))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_requests_finish(tmp_path, number):
    with running_server(tmp_path, ECHO, SLOW) as server:
        children = descendants(server)
        stream = Stream(server, max_tokens=100)
        keep_alive = server.http()
        assert keep_alive.get("/health").status_code == 200
        server.process.send_signal(number)
        wait_until(lambda: keep_alive.get("/health").status_code == 503)
        refused = keep_alive.post(CHAT, json=HELLO)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        assert stream.end()[-1]["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(20) == 0
        keep_alive.close()
        wait_until(lambda: not any(alive(child) for child in children))


def test_what_outlasts_the_grace_period_is_aborted(tmp_path):
    with running_server(tmp_path, ECHO, SLOW, grace_period_s=0.0) as server:
        stream = Stream(server)
        server.process.terminate()
        last = stream.end()[-1]
        assert last["error"]["type"] == "ServiceUnavailableError"
        assert server.process.wait(20) == 0


def test_a_second_signal_ends_the_grace_period(tmp_path):
    with running_server(tmp_path, ECHO, SLOW, grace_period_s=1000.0) as server:
        stream = Stream(server)
        server.process.terminate()
        with server.http() as http:
            wait_until(lambda: http.get("/health").status_code == 503)
        server.process.terminate()
        assert "error" in stream.end()[-1]
        assert server.process.wait(20) == 0


def test_an_engine_that_dies_in_the_grace_period_is_a_failure(server):
    stream = Stream(server)
    engine = server.engine_process()
    with server.http() as http:
        server.process.terminate()
        wait_until(lambda: http.get("/health").status_code == 503)
    engine.kill()
    assert "error" in stream.end()[-1]
    assert server.process.wait(20) == 1


def test_a_follower_serves_its_health_only_and_waits_for_its_leader_after_a_signal(tmp_path):
    """The engine here has no leader that ends it, so a second signal does."""
    with running_server(tmp_path, ECHO, SLOW, is_follower=True) as server, server.http() as http:
        assert [http.get(path).status_code for path in ("/health", "/live", "/v1/models")] == [200, 200, 404]
        assert http.post(CHAT, json=HELLO).status_code == 404
        server.process.terminate()
        wait_until(lambda: http.get("/health").status_code == 503)
        assert http.get("/live").status_code == 200
        server.process.terminate()
        assert server.process.wait(20) == 0


def test_an_engine_that_cannot_start(tmp_path):
    config = EchoConfig(fail_at_start="3.5 GiB are missing: lower --max-model-len")
    with pytest.raises(RuntimeError, match=r"The engine could not start: 3\.5 GiB are missing"):
        start(tmp_path, config)


def start(tmp_path, config) -> None:
    with running_server(tmp_path, ECHO, config):
        pass


def test_an_engine_that_cannot_be_imported(tmp_path):
    with (
        pytest.raises(RuntimeError, match="could not start: internal error: ModuleNotFoundError: No module named 'no'"),
        running_server(tmp_path, "no.such.module:build", None),
    ):
        pass


def test_a_port_that_is_taken_is_an_error_before_anything_is_loaded(server, tmp_path):
    port = int(server.url.rpartition(":")[2])
    settings = Settings(tokenizer_folder=write_folder(tmp_path / "other"), model_names=("m",), port=port)
    other = spawn(settings, ECHO, EchoConfig(), stderr=subprocess.PIPE)
    out, err = other.communicate(timeout=60)
    assert other.returncode != 0
    assert "report" not in out
    assert "Address already in use" in err


def test_a_port_that_is_taken_while_the_engine_loads_is_an_error(tmp_path):
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))  # as a second server that loads does: nobody listens yet
        port = other.getsockname()[1]
        settings = Settings(tokenizer_folder=write_folder(tmp_path), model_names=("m",), port=port)
        process = spawn(settings, ECHO, EchoConfig(start_s=1.0), stderr=subprocess.PIPE)
        assert process.stdout.readline() == "report: the echo engine is loading\n"
        other.listen()
        try:
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode != 0
    assert "ready" not in out
    assert "Address already in use" in err


def test_a_chat_template_that_is_no_template_is_said_while_the_engine_loads(tmp_path):
    folder = write_folder(tmp_path, template="{% for %}")
    process = spawn(
        Settings(tokenizer_folder=folder, model_names=("m",), port=0),
        ECHO,
        EchoConfig(start_s=1000.0),
        stderr=subprocess.PIPE,
    )
    try:
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode != 0
    assert "The chat template is not valid" in err


def test_a_signal_before_the_engine_is_ready(tmp_path):
    settings = Settings(tokenizer_folder=write_folder(tmp_path), model_names=("m",), port=0)
    process = spawn(settings, ECHO, EchoConfig(start_s=1000.0))
    assert process.stdout.readline() == "report: the echo engine is loading\n"
    process.terminate()
    assert process.wait(30) == 0
    process.stdout.close()
