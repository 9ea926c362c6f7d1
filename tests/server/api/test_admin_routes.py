"""What administrators may do, and which key they need for it."""

from __future__ import annotations

import re
import threading

import pytest

from tests.server.support.raw_http import connect, only_answer
from tests.server.support.real_engine import RealConfig
from tests.server.support.requests import ADMIN_ROUTES, HELLO, LONG, SLOW, wait_until
from tests.server.support.running import RunningServer, running_server, server_of
from tests.server.support.stub_app import StubClient, call, state_of

ADMIN = {"Authorization": "Bearer boss"}
KEY = {"Authorization": "Bearer key"}
CHAT = "/v1/chat/completions"


KEYS = {"api_keys": ("key", "another"), "admin_api_keys": ("boss",), "api_key_all_routes": True}
guarded = server_of(SLOW, enable_tokenizer_info_endpoint=True, body_timeout_s=2.0, **KEYS)


@pytest.mark.parametrize(("method", "path"), ADMIN_ROUTES)
def test_an_administrators_route_needs_an_administrators_key(guarded, method, path):
    with guarded.http() as http:
        for headers in ({}, KEY, {"Authorization": "Bearer bos"}):
            assert http.request(method, path, headers=headers).status_code == 401
        assert http.request(method, path, headers=ADMIN, json={"level": "info"}).status_code in (200, 400)


@pytest.mark.parametrize(("method", "path"), ADMIN_ROUTES)
def test_without_such_a_key_nobody_is_an_administrator(method, path):
    response = call(state_of(StubClient()), method, path, headers=ADMIN)
    assert response.status_code == 403
    assert "--admin-api-key" in response.json()["error"]["message"]


def test_any_key_opens_the_other_routes_and_all_of_them_ask(guarded):
    with guarded.http() as http:
        for path in ("/health", "/ping", "/version", "/metrics", "/v1/models", "/docs"):
            assert http.get(path).status_code == 401
            for key in ("key", "another", "boss"):
                assert http.get(path, headers={"Authorization": f"Bearer {key}"}).status_code == 200


@pytest.mark.parametrize("path", ["/admin/reload", "/sleep"])
def test_an_engine_that_cannot_change_its_weights_says_so(guarded, path):
    with guarded.http(headers=ADMIN) as http:
        refused = http.post(path, json={})
    assert refused.status_code == 400
    words = "The weights were not changed: this engine cannot pause or change its weights"
    assert words in refused.json()["error"]["message"]


def stream(server: RunningServer, done: list[str]) -> threading.Thread:
    """A streamed request that is being read; its text is in `done` when it has ended."""
    begun = threading.Event()

    def read() -> None:
        text = ""
        with server.http(headers=KEY) as http, http.stream("POST", CHAT, json=LONG) as response:
            for piece in response.iter_text():
                text += piece
                begun.set()
        done.append(text)

    thread = threading.Thread(target=read)
    thread.start()
    assert begun.wait(30)
    return thread


@pytest.mark.parametrize("by_id", [False, True])
def test_running_requests_are_aborted(guarded, by_id):
    done: list[str] = []
    thread = stream(guarded, done)
    with guarded.http(headers=ADMIN) as http:
        assert http.post("/abort_requests", json={"request_ids": ["chatcmpl-none"]}).json() == {"aborted": []}
        assert http.get("/load").json()["server_load"] == 1
        aborted = http.post("/abort_requests", json={"request_ids": None} if by_id else {}).json()["aborted"]
        thread.join(30)
        assert aborted == [re.search(r"chatcmpl-\w+", done[0])[0]]
        assert "administrator" in done[0].split("\n\n")[-3]
        assert done[0].endswith("data: [DONE]\n\n")
        wait_until(lambda: http.get("/load").json()["server_load"] == 0)


def test_the_log_level_changes_while_serving(guarded):
    with guarded.http(headers=ADMIN) as http:
        assert http.post("/log_level", json={"level": "debug"}).json() == {"level": "debug"}
        assert http.get("/log_level").json() == {"level": "debug"}
        assert http.post("/log_level", json={"level": "loud"}).json()["error"]["param"] == "level"


def test_a_prefix_cache_is_forgotten(tmp_path):
    target = "tests.server.support.real_engine:build"
    with running_server(tmp_path, target, RealConfig(), admin_api_keys=("boss",)) as server, server.http() as http:

        def cached() -> int:
            body = {"prompt": "a" * 100, "max_tokens": 2}
            usage = http.post("/v1/completions", json=body).json()["usage"]
            return usage["prompt_tokens_details"]["cached_tokens"]

        assert cached() == 0
        assert cached() > 0
        assert http.post("/reset_prefix_cache", headers=ADMIN).status_code == 200
        assert cached() == 0
        assert cached() > 0
        for query in ("reset_external=maybe", "reset_running_requests=true"):
            refused = http.post(f"/reset_prefix_cache?{query}", headers=ADMIN)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, query.partition("=")[0])


def test_the_tokenizer_describes_itself(guarded, echo):
    with guarded.http(headers=KEY) as http:
        info = http.get("/tokenizer_info").json()
    assert info["bos_token"] == "<|begin_of_text|>"
    assert info["special_tokens"]["<|eot_id|>"] == 260
    assert "start_header_id" in info["chat_template"]
    with echo.http() as http:
        assert http.get("/tokenizer_info").status_code == 404


def test_invocations_go_by_the_bodys_fields(echo):
    with echo.http() as http:
        chat = http.post("/invocations", json=HELLO | {"max_tokens": 2}).json()
        assert chat["object"] == "chat.completion"
        completion = http.post("/invocations", json={"prompt": "ab", "max_tokens": 2}).json()
        assert completion["choices"][0]["text"] == "a"  # after begin-of-text
        refused = http.post("/invocations", json={"input": "ab"})
        assert (refused.status_code, "--enable-embeddings" in refused.text) == (404, True)
        refused = http.post("/invocations", json={"temperature": 0})
        assert "`messages`, `prompt` or `input`" in refused.json()["error"]["message"]
        streamed = http.post("/invocations", json=HELLO | {"max_tokens": 2, "stream": True}).text
        assert streamed.endswith("data: [DONE]\n\n")


def test_a_body_that_does_not_come_counts_as_408(guarded):
    head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer key\r\nContent-Length: 1000\r\n\r\n{{"
    with connect(guarded, head.encode()) as connection:
        assert only_answer(connection).status == 408
    with guarded.http(headers=KEY) as http:
        wait_until(lambda: f'handler="{CHAT}",method="POST",status="408"' in http.get("/metrics").text)
        assert f'handler="{CHAT}",method="POST",status="400"' not in http.get("/metrics").text
