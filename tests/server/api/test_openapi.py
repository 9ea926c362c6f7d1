"""/openapi.json and /docs."""

from __future__ import annotations

import re

import jsonschema

from tests.server.support.requests import ADMIN_ROUTES
from tests.server.support.stub_app import DONE, StubClient, call, state_of

HELLO = {"messages": [{"role": "user", "content": "hello"}]}


def document(**settings):
    return call(
        state_of(StubClient(DONE), **settings), "GET", "/openapi.json", headers={"Authorization": "Bearer a"}
    ).json()


def test_every_route_is_described():
    paths = document()["paths"]
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/invocations"):
        assert "200" in paths[path]["post"]["responses"]
        assert paths[path]["post"]["summary"]
    assert paths["/v1/models/{name}"]["get"]["parameters"][0]["name"] == "name"
    item = paths["/v1/conversations/{id}/items/{item_id}"]["delete"]
    assert [parameter["name"] for parameter in item["parameters"]] == ["id", "item_id"]


def test_a_key_is_asked_for_where_the_server_has_keys():
    def asking(**settings):
        paths = document(**settings)["paths"]
        return {path for path, methods in paths.items() for method in methods.values() if "security" in method}

    assert asking() == set()
    assert asking(admin_api_keys=("a",)) == {path for _, path in ADMIN_ROUTES}
    assert asking(api_keys=("a",)) >= {"/v1/chat/completions", "/v1/models"}
    assert not asking(api_keys=("a",)) & {"/health", "/metrics"}
    assert asking(api_keys=("a",), api_key_all_routes=True) >= {"/health", "/metrics"}


def test_answers_and_errors_are_of_the_kinds_that_are_sent():
    paths = document()["paths"]
    answers = {path: set(paths[path]["post"]["responses"]["200"]["content"]) for path in ("/v1/messages", "/tokenize")}
    assert answers == {"/v1/messages": {"application/json", "text/event-stream"}, "/tokenize": {"application/json"}}
    for path, name in (("/v1/messages", "AnthropicError"), ("/v1/completions", "Error")):
        (content,) = paths[path]["post"]["responses"]["default"]["content"].values()
        assert content["schema"] == {"$ref": f"#/components/schemas/{name}"}


def test_schemas_are_valid_and_judge_bodies():
    schemas = document()
    reference = schemas["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    schema = {**reference, "components": schemas["components"]}
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    assert validator.is_valid(HELLO | {"temperature": 0.5, "stop": ["a"], "unknown": 1})
    assert not validator.is_valid({"messages": "hello"})
    assert not validator.is_valid(HELLO | {"temperature": "hot"})


def test_the_page_has_no_outside_address():
    page = call(state_of(StubClient(DONE)), "GET", "/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "POST /v1/chat/completions" in page.text
    assert "max_completion_tokens" in page.text
    assert not re.search(r"https?://|//[a-z]|<script|<link|@import", page.text)


def test_the_documents_can_be_left_out():
    state = state_of(StubClient(DONE), disable_fastapi_docs=True)
    assert [call(state, "GET", path).status_code for path in ("/docs", "/openapi.json", "/health")] == [404, 404, 200]
