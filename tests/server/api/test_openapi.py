"""/openapi.json and /docs."""

from __future__ import annotations

import re

import jsonschema

from tests.server.support.stub_app import DONE, StubClient, call, state_of

HELLO = {"messages": [{"role": "user", "content": "hello"}]}


def document():
    return call(state_of(StubClient(DONE)), "GET", "/openapi.json").json()


def test_every_route_is_described():
    paths = document()["paths"]
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/invocations"):
        assert "200" in paths[path]["post"]["responses"]
        assert paths[path]["post"]["summary"]
    assert "security" not in paths["/health"]["get"]
    assert paths["/v1/models/{name}"]["get"]["parameters"][0]["name"] == "name"


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
