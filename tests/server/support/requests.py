"""Requests that many tests send, and what they wait for."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator

import pytest

from tests.server.support.echo_engine import EchoConfig
from tests.server.support.running import RunningServer

ADMIN_ROUTES = [
    *(("POST", "/reset_prefix_cache"), ("POST", "/abort_requests"), ("GET", "/log_level"), ("POST", "/log_level")),
    *(("POST", "/admin/reload"), ("POST", "/sleep"), ("POST", "/wake_up"), ("GET", "/is_sleeping")),
    *(("POST", "/pause"), ("POST", "/resume"), ("GET", "/is_paused"), ("POST", "/init_weight_transfer_engine")),
    *(("POST", "/start_weight_update"), ("POST", "/update_weights"), ("POST", "/finish_weight_update")),
    *(("GET", "/get_weight_version"), ("GET", "/weight_info"), ("GET", "/get_world_size")),
    *(("POST", f"{base}/models/{change}") for base in ("", "/v1") for change in ("load", "unload")),
    *(("POST", "/v1/load_lora_adapter"), ("POST", "/v1/unload_lora_adapter"), ("POST", "/drain"), ("DELETE", "/drain")),
    ("GET", "/server_info"),
]
CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
LONG = HELLO | {"stream": True, "ignore_eos": True, "max_tokens": 4000}
SLOW = EchoConfig(reply=tuple(b"abcdefghij"), step_s=0.02, max_model_len=20000)
# some 10 MB for each choice: more than the sockets' buffers take
BULKY = HELLO | {"stream": True, "n": 2, "logprobs": True, "top_logprobs": 20}
# the demo has learned to call it
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluates an expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
PRODUCT = [{"role": "user", "content": "What is 347 * 21?"}]


def send(server: RunningServer, body: dict, *, receive_buffer: int | None = None) -> socket.socket:
    """A socket on which the request has been sent and nothing read."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.connect((host, int(port)))
    data = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    connection.sendall(f"{head}\r\n\r\n".encode() + data)
    return connection


def reading(server: RunningServer, name: str, label: str = "") -> float:
    """A number of the engine, by the first sample of that name in which the label stands. It is up to a second old."""
    with server.http() as http:
        lines = http.get("/metrics").text.splitlines()
    return float(next(x for x in lines if x.startswith(f"pallas_serve:{name}{{") and label in x).split()[-1])


def running(server: RunningServer) -> int:
    """Requests in the engine, by its own account."""
    return int(reading(server, "num_requests_running"))


def wait_until_idle(server: RunningServer) -> None:
    """Until nothing runs and no page is used, by a reading that is newer than this call: one more token shows it."""
    before = reading(server, "generation_tokens_total")
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
    wait_until(lambda: reading(server, "generation_tokens_total") > before)
    wait_until(lambda: running(server) == reading(server, "kv_cache_usage_perc") == 0)


def load(server: RunningServer) -> int:
    with server.http() as http:
        return http.get("/load").json()["server_load"]


@pytest.fixture(autouse=True)
def requests_end_with_their_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """For the conftest.py of a package: what a test leaves running on a server, such as one that fails, is aborted."""
    yield
    for server in request.node.funcargs.values():
        if isinstance(server, RunningServer) and server.admin_key is not None and server.process.poll() is None:
            _end_requests(server, server.admin_key)


def _end_requests(server: RunningServer, admin_key: str) -> None:
    with server.http(headers={"Authorization": f"Bearer {admin_key}"}, verify=False) as http:

        def is_idle() -> bool:
            return http.get("/load").json()["server_load"] == 0

        if not is_idle():
            http.post("/abort_requests", json={}).raise_for_status()
            wait_until(is_idle, timeout_s=300.0)  # chat templates that wait take ten seconds each


def wait_until(condition, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
