"""A deadline for a request, and a share of the server for a key."""

from __future__ import annotations

import pytest

from server.engine import wire
from server.settings import Settings
from tests.server.support.raw_http import connect, post
from tests.server.support.requests import CHAT, HELLO, LONG, SLOW, reading, wait_until
from tests.server.support.running import RunningServer, server_of
from tests.server.support.sse_events import parse_events
from tests.server.support.stub_app import COMPLETIONS, DONE, StubClient, call, state_of

HEADER = "X-Request-Timeout"


shared = server_of(SLOW, api_keys=("one", "two"), max_concurrent_per_key=2)


def limited(server: RunningServer, limit: str) -> float:
    return reading(server, "requests_limited_total", f'limit="{limit}"')


@pytest.mark.parametrize("by_header", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_running_request_ends_with_what_there_is(slow, by_header, stream):
    before = limited(slow, "deadline_running")
    body = LONG | {"stream": stream, "n": 2} | ({} if by_header else {"timeout_s": 0.5})
    with slow.http(headers={HEADER: "0.5"} if by_header else {}) as http:
        response = http.post(CHAT, json=body)
        if stream:
            choices = [choice for chunk in parse_events(response.text) for choice in chunk["choices"]]
            texts = ["".join(c["delta"].get("content", "") for c in choices if c["index"] == i) for i in (0, 1)]
            reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
        else:
            texts = [choice["message"]["content"] for choice in response.json()["choices"]]
            reasons = [choice["finish_reason"] for choice in response.json()["choices"]]
        assert reasons == ["length", "length"]
        assert all(text and ("abcdefghij" * 400).startswith(text) for text in texts)
        assert all(len(text) < 4000 for text in texts)
        wait_until(lambda: http.get("/load").json()["server_load"] == 0)
    assert limited(slow, "deadline_running") == before + 2


def test_a_request_that_ends_in_time_is_not_touched(slow):
    answer = slow.post(CHAT, HELLO | {"max_tokens": 3, "timeout_s": 1000, "ignore_eos": True}).json()
    assert answer["choices"][0]["message"]["content"] == "abc"


def test_a_request_that_waits_too_long_is_refused():
    waited = wire.Output("", [], "error", error="it waited too long", status=503, expired=True)
    client = StubClient(waited)
    state = state_of(client, queue_timeout_s=50.0)
    response = call(state, "POST", COMPLETIONS, json={"prompt": "a", "timeout_s": 60}, headers={HEADER: "20"})
    assert response.status_code == 503
    assert 10 < client.submitted[0].deadline_s <= 20
    assert 'limit="deadline_waiting",model_name="m"} 1.0' in state.metrics.render().decode()
    call(state, "POST", COMPLETIONS, json={"prompt": "a", "timeout_s": 60})
    assert client.submitted[1].deadline_s == 50


@pytest.mark.parametrize("value", [0, -1, "nan", 1e9])
def test_deadlines_that_cannot_be(value):
    state = state_of(StubClient(DONE))
    response = call(state, "POST", COMPLETIONS, json={"prompt": "a", "timeout_s": value})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "timeout_s")
    response = call(state, "POST", COMPLETIONS, json={"prompt": "a"}, headers={HEADER: str(value)})
    assert (response.status_code, response.json()["error"]["param"]) == (400, HEADER)


def test_a_header_that_is_no_number():
    response = call(state_of(StubClient(DONE)), "POST", COMPLETIONS, json={"prompt": "a"}, headers={HEADER: "soon"})
    assert response.json()["error"]["param"] == HEADER


def test_a_key_has_its_share_and_no_more(shared):
    request = post(CHAT, LONG | {"max_tokens": 10_000}, "Authorization: Bearer one")
    running = [connect(shared, request) for _ in range(2)]
    try:
        for connection in running:
            assert connection.recv(1) == b"H"
        short = HELLO | {"max_tokens": 1}
        with shared.http(headers={"Authorization": "Bearer one"}) as http:
            refused = http.post(CHAT, json=short)
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
            assert "--max-concurrent-per-key" in refused.json()["error"]["message"]
            assert http.get("/v1/models").status_code == 200  # only generation counts
        with shared.http(headers={"Authorization": "Bearer two"}) as http:
            assert http.post(CHAT, json=short).status_code == 200
        assert limited(shared, "key_share") == 1
    finally:
        for connection in running:
            connection.close()
    with shared.http(headers={"Authorization": "Bearer one"}) as http:
        wait_until(lambda: http.post(CHAT, json=short).status_code == 200)


def test_a_share_needs_keys(tmp_path):
    with pytest.raises(ValueError, match="--api-key"):
        Settings(tokenizer_folder=tmp_path, model_names=("m",), max_concurrent_per_key=2)
