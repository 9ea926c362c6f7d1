"""What answers tell besides their content: ignored fields, cut prompts, the load, routes that are not there."""

from __future__ import annotations

import json

import pytest

from tests.server.support.requests import CHAT, HELLO
from tests.server.support.stub_app import DONE, StubClient, call, state_of


@pytest.mark.parametrize("stream", [False, True])
def test_headers_name_what_was_ignored_and_cut(echo, stream):
    with echo.http() as http:
        short = HELLO | {"max_tokens": 1, "truncate_prompt_tokens": 10, "stream": stream}
        count = http.post("/tokenize", json=HELLO).json()["count"]
        for _ in range(2):
            headers = http.post(CHAT, json=short | {"colour": 1, "verbosity": "low", "häss\r\nlich": 2}).headers
            assert headers["x-ignored-fields"] == "colour, verbosity, h%C3%A4ss%0D%0Alich"
            assert headers["x-truncated-prompt-tokens"] == str(count - 10)
        texts = {"prompt": ["abc", "a", "ab"], "max_tokens": 1, "truncate_prompt_tokens": 2, "stream": stream}
        assert http.post("/v1/completions", json=texts).headers["x-truncated-prompt-tokens"] == "2, 1"
        long = {"messages": HELLO["messages"], "max_tokens": 50_000, "stream": stream}
        lowered = http.post("/v1/messages", json=long | {"stop_sequences": ["e"]}).headers
        assert int(lowered["x-lowered-max-tokens"]) == 4096 - count
        plain = http.post(CHAT, json=HELLO | {"max_tokens": 1, "stream": stream}).headers
    assert not {"x-ignored-fields", "x-truncated-prompt-tokens", "x-lowered-max-tokens"} & plain.keys()


@pytest.mark.parametrize("stream", [False, True])
def test_a_balancer_gets_the_load(stream):
    client = StubClient(DONE)
    client.stats.num_pages, client.stats.num_pages_used, client.stats.num_requests_waiting = 8, 2, 3
    found = []
    for form in ("JSON", "text", "bin", None):
        headers = {} if form is None else {"endpoint-load-metrics-format": form}
        answer = call(state_of(client), "POST", CHAT, json=HELLO | {"max_tokens": 1, "stream": stream}, headers=headers)
        found.append(answer.headers.get("endpoint-load-metrics"))
    assert found[1:] == [
        "TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_waiting=3.0",
        None,
        None,
    ]
    form, _, report = found[0].partition(" ")
    load = {"kv_cache_usage_perc": 0.25, "num_requests_waiting": 3.0}
    assert (form, json.loads(report)) == ("JSON", {"named_metrics": load})


@pytest.mark.parametrize(
    ("path", "words"),
    [
        *((path, "--enable-embeddings") for path in ("/v1/embeddings", "/pooling", "/score", "/v1/score", "/classify")),
        *((path, "--enable-embeddings") for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
        ("/classify", "logprob_token_ids"),
        *(("/v1/files", "--batch-folder"), ("/v1/batches", "--batch-folder")),
        *(("/chat/completions", "/v1/chat/completions"), ("/v1/pooling", "/pooling"), ("/generate", "/openapi.json")),
    ],
)
def test_a_route_that_is_not_there_says_what_is(path, words):
    answer = call(state_of(StubClient()), "POST", path, json={})
    assert (answer.status_code, words in answer.json()["error"]["message"]) == (404, True), answer.text


def test_the_server_tells_administrators_about_itself_and_no_secret():
    state = state_of(StubClient(), api_keys=("user-secret",), admin_api_keys=("boss-secret",), queue_timeout_s=7.0)
    told = call(state, "GET", "/server_info", headers={"Authorization": "Bearer boss-secret"})
    assert (told.json()["settings"]["queue_timeout_s"], told.json()["engine"]["max_model_len"]) == (7.0, 64)
    assert "secret" not in told.text
