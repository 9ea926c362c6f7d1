"""The application without an engine process: what depends on the engine's health, and what goes wrong inside."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from pathlib import Path

import httpx
import pytest

from server.app import create_app
from server.engine import wire
from server.settings import Settings
from server.text.tool_calls.formats import FORMATS
from tests.server.support.stub_app import COMPLETIONS, DONE, StubClient, call, state_of


def test_health_depends_on_the_engine():
    client = StubClient()
    state = state_of(client, heartbeat_timeout_s=10)
    assert call(state, "GET", "/health").status_code == 200
    client.last_heartbeat -= 11
    message = call(state, "GET", "/health").json()["error"]["message"]
    assert re.search(r"not been heard of for \d\d s", message)
    client.last_heartbeat = time.monotonic()
    client.death = "killed"
    for path in ("/health", COMPLETIONS):
        response = call(state, "GET" if path == "/health" else "POST", path, json={"prompt": "a"})
        assert response.status_code == 503
        assert "killed" in response.json()["error"]["message"]


def test_a_draining_server_is_live_and_not_ready():
    client = StubClient()
    state = state_of(client, heartbeat_timeout_s=10)
    state.draining = True
    assert call(state, "GET", "/live").status_code == 200
    assert call(state, "GET", "/health").status_code == 503
    client.last_heartbeat -= 11
    assert call(state, "GET", "/live").status_code == 503
    client.death = "killed"
    assert "killed" in call(state, "GET", "/live").json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("status", "kind"), [(429, "RateLimitError"), (503, "ServiceUnavailableError"), (500, None)])
def test_a_refusal_of_the_engine_has_its_own_status(stream, status, kind):
    client = StubClient(wire.Output("", [], "error", error="no room", status=status))
    response = call(state_of(client), "POST", COMPLETIONS, json={"prompt": "a", "stream": stream, "n": 2})
    assert response.status_code == status
    error = response.json()["error"]
    assert error["message"] == "no room"
    assert error["type"] == (kind or "InternalServerError")
    assert len(set(client.aborted)) == 2


def test_a_refused_field_is_named():
    client = StubClient(wire.Output("", [], "error", error="too many", status=400, param="stop_token_ids"))
    response = call(state_of(client), "POST", COMPLETIONS, json={"prompt": "a"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "stop_token_ids"


def test_an_output_that_makes_no_sense_fails_its_request():
    bad = wire.Output("", [1, 2], logprobs=[wire.Logprobs.packed(-1.0, [], [])])
    response = call(state_of(StubClient(bad)), "POST", COMPLETIONS, json={"prompt": "a", "logprobs": 1})
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "InternalServerError"


def test_an_unexpected_exception_is_an_error_object(monkeypatch):
    client = StubClient(DONE)

    def fail(requests):
        raise RuntimeError("boom")

    monkeypatch.setattr(client, "submit", fail)
    response = call(state_of(client), "POST", COMPLETIONS, json={"prompt": "a"}, headers={"x-request-id": "mine"})
    assert response.status_code == 500
    assert response.headers["x-request-id"] == "mine"
    assert "boom" not in response.text  # what went wrong inside is not the client's to read


def test_failures_of_one_kind_are_logged_once(monkeypatch, caplog):
    client = StubClient(DONE)
    monkeypatch.setattr(client, "submit", lambda requests: 1 / 0)
    state = state_of(client)

    async def requests() -> list[httpx.Response]:
        transport = httpx.ASGITransport(create_app(state), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            return [await http.post(COMPLETIONS, json={"prompt": "a"}) for _ in range(20)]

    assert {response.status_code for response in asyncio.run(requests())} == {500}
    (record,) = (record for record in caplog.records if record.exc_info)
    assert record.exc_info[0] is ZeroDivisionError


def test_a_template_that_refuses_is_a_400():
    state = state_of(StubClient(), template="{{ raise_exception('roles must alternate') }}")
    response = call(state, "POST", "/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}]})
    assert response.status_code == 400
    assert "roles must alternate" in response.json()["error"]["message"]


def test_the_template_of_the_settings_replaces_the_tokenizers():
    client = StubClient(DONE)
    state = state_of(client, chat_template="{{ messages[0].content }}!")
    call(state, "POST", "/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}]})
    assert client.submitted[0].prompt == wire.packed(list(b"a!"))


@pytest.mark.parametrize(
    ("name", "shown"), [("hermes", "<tool_call>"), ("xlam", '[{"name": "tool_call_name", "arguments": {"a": 1}}, ...]')]
)
def test_the_log_says_which_form_of_calls_the_template_shows(caplog, name, shown):
    caplog.set_level(logging.INFO, logger="pallas_serve")
    state = state_of(StubClient(), template="{{ messages }}" + shown)
    assert state.model.call_format is FORMATS[name]
    assert [record.message for record in caplog.records if f"--tool-call-parser {name}" in record.message]
    caplog.clear()
    assert state_of(StubClient()).model.call_format is FORMATS["llama3_json"]
    chosen = state_of(StubClient(), template=shown, tool_call_parser="pythonic")
    assert chosen.model.call_format is FORMATS["pythonic"]
    assert not caplog.records


def test_what_a_request_says_reaches_the_engine():
    client = StubClient(DONE)
    state = state_of(client, queue_timeout_s=7.0)
    body = {"prompt": "a", "priority": -2, "cache_salt": "s", "n": 2, "seed": 5, "logprobs": 3}
    call(state, "POST", COMPLETIONS, json=body)
    first, second = client.submitted
    assert (first.priority, first.deadline_s) == (-2, 7.0)
    assert first.cache_salt == second.cache_salt != 0
    assert first.group == second.group != ""
    assert (first.sampling.seed, second.sampling.seed) == (5, 6)
    assert first.sampling.logprobs == 3
    assert first.request_id.endswith("-0")
    assert second.request_id.endswith("-1")


@pytest.mark.parametrize(("stream", "asked"), [(False, [3, None, 3, None]), (True, [3, 3, 3, 3])])
def test_a_prompt_is_scored_once_where_its_choices_are_answered_together(stream, asked):
    scores = [wire.Logprobs.packed(-1.0, [98, 99, 100], [-1.0, -2.0, -3.0])]
    client = StubClient(wire.Output("", [ord("a")], "length", logprobs=scores, prompt_logprobs=scores))
    body = {"prompt": ["a", "b"], "n": 2, "echo": True, "logprobs": 3, "stream": stream}
    response = call(state_of(client), "POST", COMPLETIONS, json=body)
    assert response.status_code == 200
    assert "error" not in response.text
    assert [request.sampling.prompt_logprobs for request in client.submitted] == asked
    assert [bool(request.prompt) for request in client.submitted] == [True, False] * 2  # and sent once


def test_a_request_with_too_many_sequences():
    body = {"prompt": ["a", "b"], "n": 3}
    response = call(state_of(StubClient(), max_choices=5), "POST", COMPLETIONS, json=body)
    assert response.status_code == 400
    assert "at most 5" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"model_names": ()},
        {"model_names": ("",)},
        {"port": 70000},
        {"max_request_logprobs": 0},
        {"api_keys": ("sk-one", "")},
        {"queue_timeout_s": 0.0},
        {"api_keys": ("sk-two ",)},
        {"api_keys": ("sk\n",)},
        {"max_connections": 0},
        {"head_timeout_s": 0.0},
        {"body_timeout_s": float("nan")},
        {"max_body_memory_mib": 15},
        {"prefix_caching_per_key": True},
        {"idle_timeout_s": float("inf")},
    ],
)
def test_settings_that_cannot_be(fields):
    with pytest.raises(ValueError):
        Settings(**({"tokenizer_folder": Path(), "model_names": ("m",)} | fields))
