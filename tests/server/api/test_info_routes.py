"""The routes besides generation, the API key, request ids and CORS."""

from __future__ import annotations

import pytest

from tests.server.support.echo_engine import EchoConfig
from tests.server.support.running import server_of
from tests.server.support.sse_events import stream_events
from tests.server.support.tokenizers import BOS, EOT

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
ROUTES = [
    ("GET", "/v1/models"),
    ("GET", "/v1/models/test-model"),
    ("GET", "/load"),
    ("POST", CHAT),
    ("POST", "/v1/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/nowhere"),
]


keyed = server_of(EchoConfig(), template=None, api_keys=("key-one", "key-twø"), metrics_prefix="vllm:")
forced = server_of(EchoConfig(), enable_force_include_usage=True)


def get(server, path, **headers):
    with server.http() as http:
        return http.get(path, headers=headers)


def test_models(echo):
    models = get(echo, "/v1/models").json()
    first = models["data"][0]
    assert [model["id"] for model in models["data"]] == ["test-model", "alias"]
    assert (first["object"], first["max_model_len"], first["parent"]) == ("model", 4096, None)
    assert first["permission"][0]["object"] == "model_permission"
    own = {"anthropic-version": "2023-06-01"}
    with echo.http() as http:
        listed, one = (http.get(path, headers=own).json() for path in ("/v1/models", "/v1/models/alias"))
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "test-model", "alias")
    assert (listed["data"][1], one["type"], one["id"]) == (one, "model", "alias")
    assert one["created_at"].endswith("Z")
    assert get(echo, "/v1/models/gpt-0").status_code == 404
    assert [model.id for model in echo.client().models.list()] == ["test-model", "alias"]


def test_health_version_and_load(echo):
    assert get(echo, "/health").status_code == 200
    assert get(echo, "/version").json() == {"version": "1.2.3"}
    assert get(echo, "/load").json() == {"server_load": 0}


def test_tokenize_and_detokenize(echo):
    with echo.http() as http:
        answer = http.post("/tokenize", json={"prompt": "a<|eot_id|>", "return_token_strs": True}).json()
        assert answer == {
            "count": 3,
            "max_model_len": 4096,
            "tokens": [BOS, 97, EOT],
            "token_strs": ["<|begin_of_text|>", "a", "<|eot_id|>"],
        }
        chat = http.post("/tokenize", json={"messages": HELLO["messages"], "add_generation_prompt": False}).json()
        assert chat["count"] == 15
        assert chat["token_strs"] is None
        assert http.post("/detokenize", json={"tokens": [BOS, 195, 169]}).json() == {"prompt": "<|begin_of_text|>é"}
        assert http.post("/detokenize", json={"tokens": [262]}).status_code == 400
        assert http.post("/tokenize", json={}).status_code == 400


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_routes_ask_for_the_key(keyed, method, path):
    with keyed.http() as http:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic key-one"}):
            response = http.request(method, path, headers=headers)
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"
            error = response.json()["error"]
            assert (error["type"], error["code"]) == ("AuthenticationError", "invalid_api_key")
        assert http.request(method, path, headers={"Authorization": "Bearer key-one"}).status_code != 401


@pytest.mark.parametrize("value", ["Bearer key-one", "bearer key-one", "BEARER key-twø"])
def test_any_key_and_any_case_of_the_scheme(keyed, value):
    assert get(keyed, "/load", Authorization=value.encode()).status_code == 200


@pytest.mark.parametrize("options", [None, {"include_usage": False}, {"continuous_usage_stats": False}], ids=str)
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_forced_usage_is_in_every_chunk(forced, path, options):
    """As vLLM's, whatever the request's `stream_options` say."""
    body = {"stream": True, "max_tokens": 5, "stream_options": options}
    body |= {"messages": HELLO["messages"]} if path == CHAT else {"prompt": "hello"}
    with forced.http() as http:
        chunks = stream_events(http, path, body)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-2:] == [5, 5]
    assert chunks[-1]["choices"] == []


def test_the_official_client_with_and_without_the_key(keyed):
    import openai

    assert keyed.client(api_key="key-one").models.list().data
    with pytest.raises(openai.AuthenticationError):
        keyed.client(api_key="wrong").models.list()


OPEN = ["/health", "/live", "/ping", "/version", "/metrics", "/openapi.json", "/docs"]


def test_probes_prometheus_and_options_need_no_key(keyed):
    assert {path: get(keyed, path).status_code for path in OPEN} == dict.fromkeys(OPEN, 200)
    with keyed.http() as http:
        preflight = {"Origin": "http://a.example", "Access-Control-Request-Method": "POST"}
        response = http.options(CHAT, headers=preflight | {"Access-Control-Request-Headers": "authorization"})
        assert response.status_code == 200
        assert "POST" in response.headers["access-control-allow-methods"]
        assert http.options(CHAT).status_code != 401


def test_a_page_of_another_origin_may_read_answers_and_refusals(keyed):
    for headers in ({"Authorization": "Bearer key-one"}, {}):
        response = get(keyed, "/load", Origin="http://a.example", **headers)
        assert response.headers["access-control-allow-origin"] == "*"


def test_request_ids_are_echoed_or_made(echo):
    assert get(echo, "/version", **{"X-Request-Id": "mine"}).headers["x-request-id"] == "mine"
    made = {get(echo, "/version").headers["x-request-id"] for _ in range(2)}
    assert len(made) == 2
    assert all(int(name, 16) >= 0 for name in made)
    with echo.http() as http:
        for path, json in ((CHAT, HELLO | {"stream": True}), (CHAT, {}), ("/nowhere", {})):
            response = http.post(path, json=json, headers={"X-Request-Id": "mine"})
            assert response.headers["x-request-id"] == "mine"


def test_without_a_template_chats_are_refused_in_words(keyed):
    with keyed.http(headers={"Authorization": "Bearer key-one"}) as http:
        response = http.post(CHAT, json=HELLO)
        assert response.status_code == 400
        assert "/v1/completions" in response.json()["error"]["message"]


def test_the_metrics_prefix(keyed):
    text = get(keyed, "/metrics", Authorization="Bearer key-one").text
    assert 'vllm:num_requests_running{engine="0",model_name="test-model"} ' in text
    assert "pallas_serve:" not in text
