"""The line of each request in the JSON log, and the usage of API keys, of real servers."""

from __future__ import annotations

import contextlib
import json

import pytest

from tests.server.support.api_processes import through_each
from tests.server.support.echo_engine import EchoConfig
from tests.server.support.requests import CHAT, HELLO, wait_until
from tests.server.support.running import ECHO, RunningServer, running_server

KEYS = {"api_keys": ("one", "two"), "admin_api_keys": ("boss",), "api_key_names": ("Ann",)}


def lines_of(server: RunningServer) -> dict[str, dict]:
    """The lines of requests, by their ids. Every line of the log is a JSON object."""
    lines = [json.loads(line) for line in server.log.splitlines()]
    return {line["request_id"]: line for line in lines if line["logger"] == "pallas_serve.requests"}


@pytest.mark.parametrize("num_processes", [1, 2])
def test_each_request_has_a_line_and_its_key_is_counted(tmp_path, num_processes):
    config = EchoConfig(reply=tuple(b"abc"), step_s=0.002)
    body = HELLO | {"max_tokens": 7, "ignore_eos": True, "n": 2}
    settings = KEYS | {"api_server_count": num_processes, "log_format": "json"}
    with running_server(tmp_path, ECHO, config, **settings) as server:
        with server.http(headers={"Authorization": "Bearer one"}) as http:
            for name, more in (("whole", {}), ("strëam", {"stream": True})):
                answer = http.post(CHAT, json=body | more, headers={"x-request-id": name.encode("latin-1")})
                assert answer.status_code == 200
            http.post(CHAT, json=body | {"n": 0}, headers={"x-request-id": "refused"})
            http.get("/health", headers={"x-request-id": "probe"})
        admin = {"Authorization": "Bearer boss", "x-request-id": "level"}
        with server.http(headers=admin) as http:
            http.post("/log_level", json={"level": "info"})
        two = {"headers": {"Authorization": "Bearer two"}}
        with contextlib.ExitStack() as stack:
            if num_processes == 1:
                clients = [stack.enter_context(server.http(**two))]
            else:
                clients = stack.enter_context(through_each(server, **two))
            for number, client in enumerate(clients):
                client.post(CHAT, json=body, headers={"x-request-id": f"two-{number}"})
            wait_until(lambda: len(lines_of(server)) == 4 + num_processes)
            for client in clients:
                wait_until(lambda client=client: usage(client, "key-2")[0] == num_processes)
            found = {name: usage(clients[0], name) for name in ("Ann", "key-2", "admin-1")}
    lines = lines_of(server)
    whole, stream = lines["whole"], lines["strëam"]
    for line in (whole, stream):
        assert 0 <= line["ttft_s"] <= line["duration_s"]
        assert line["id"].startswith("chatcmpl-")
    shown = ("key", "path", "status", "model", "completion_tokens", "finish_reason")
    assert [whole[name] for name in shown] == ["Ann", CHAT, 200, "test-model", 14, "length"]
    same = (*shown, "prompt_tokens", "level", "method")
    assert [stream[name] for name in same] == [whole[name] for name in same]
    assert lines["refused"]["status"] == 400 and "model" not in lines["refused"]
    assert (lines["level"]["key"], lines["level"]["path"]) == ("admin-1", "/log_level")
    assert "probe" not in lines
    prompt = whole["prompt_tokens"]
    assert found["Ann"] == [2, 2 * prompt, 28]
    assert found["key-2"] == [num_processes, num_processes * prompt, num_processes * 14]
    assert found["admin-1"] == [0, 0, 0]


def usage(client, key: str) -> list[float]:
    """The requests, the tokens of prompts and those of outputs that /metrics has of a key."""
    lines = client.get("/metrics").text.splitlines()
    mark = f'{{engine="0",key="{key}",model_name="test-model"}} '
    names = [f"pallas_serve:key_{name}_total" for name in ("requests", "prompt_tokens", "generation_tokens")]
    return [sum(float(line.split()[-1]) for line in lines if line.startswith(name + mark)) for name in names]
