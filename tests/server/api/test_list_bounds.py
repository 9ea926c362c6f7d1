"""Every list of every request has a bound, and a longer one is refused by name. The lists come from /openapi.json, so
that a new field cannot be forgotten."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.api.request import body as long_body
from server.api.request.body import LONG_BODY, count_marks
from server.api.request.schemas import MAX_TOKEN_IDS
from server.api.state import ServerState
from tests.server.support.stub_app import COMPLETIONS, DONE, StubClient, call, post_all, state_of

pytestmark = pytest.mark.slow

MANY = 100_000  # more than any body may have of what its type does not allow
HEADERS = {"Authorization": "Bearer boss"}
Schema = dict[str, Any]
Places = tuple[str, ...]


def state_with_all_routes() -> ServerState:
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    given = {"admin_api_keys": ("boss",), "trust_request_chat_template": True, "batch_folder": folder}
    state = state_of(StubClient(DONE), **given)
    state.engine.info = msgspec.structs.replace(state.engine.info, embedding_size=4)
    return state


STATE = state_with_all_routes()
DOCUMENT = call(STATE, "GET", "/openapi.json").json()
COMPONENTS = DOCUMENT["components"]["schemas"]
BODIES = {
    path: content["application/json"]["schema"]
    for path, operations in DOCUMENT["paths"].items()
    if "application/json" in (content := operations.get("post", {}).get("requestBody", {}).get("content", {}))
}


def resolved(schema: Schema) -> Schema:
    return COMPONENTS[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def options(schema: Schema) -> list[Schema]:
    return [inner for option in schema["anyOf"] for inner in options(option)] if "anyOf" in schema else [schema]


def least(schema: Schema) -> Any:
    """A value of the schema, as small as it can be."""
    schema = resolved(options(schema)[0])
    if "enum" in schema:
        return schema["enum"][0]
    kinds = {
        "string": "AAAA" if "contentEncoding" in schema else "a",
        "integer": 1,
        "number": 1,
        "boolean": True,
        "array": [],
        "null": None,
    }
    if schema.get("type") != "object":
        return kinds.get(schema.get("type", "null"))
    return {name: least(schema["properties"][name]) for name in schema.get("required", ())}


def lists(schema: Schema, seen: tuple[str, ...] = ()) -> Iterator[tuple[Places, Schema, Any]]:
    """(the names on the way, the list's schema, a value of `schema` in which the list has one entry too many)"""
    for option in options(schema):
        if option.get("$ref") in seen:
            continue
        within, kind = (*seen, option.get("$ref", "")), resolved(option)
        if kind.get("type") == "array":
            yield (), kind, [least(kind["items"])] * (kind.get("maxItems", MANY) + 1)
            yield from ((path, inner, [value]) for path, inner, value in lists(kind["items"], within))
        for name, field in kind.get("properties", {}).items():
            for path, inner, value in lists(field, within):
                yield (name, *path), inner, least(kind) | {name: value}


LISTS = [(route, *found) for route, schema in BODIES.items() for found in lists(schema)]


def refused(route: str, body: Any) -> str:
    response = call(STATE, "POST", route, json=body, headers=HEADERS)
    assert response.status_code == 400, response.text[:500]
    return response.json()["error"]["message"]


def test_the_table_has_the_lists_that_are_known():
    found = {(route, ".".join(path)) for route, path, _, _ in LISTS}
    assert found >= {
        ("/v1/chat/completions", "stop"),
        ("/v1/chat/completions", "messages.content"),
        ("/v1/completions", "prompt"),
        ("/v1/responses", "include"),
        ("/v1/messages", "system.content"),
        ("/v1/embeddings", "input"),
        ("/detokenize", "tokens"),
        ("/abort_requests", "request_ids"),
    }


@pytest.mark.parametrize(("route", "path", "schema", "body"), LISTS, ids=[f"{r}:{'.'.join(p)}" for r, p, _, _ in LISTS])
def test_a_list_with_one_entry_too_many_is_refused_by_name(route, path, schema, body):
    assert schema["maxItems"] <= MAX_TOKEN_IDS
    message = refused(route, body)
    assert message.startswith((f"{path[0]}:", f"{path[0]}.")), message
    assert f"at most {schema['maxItems']} entries" in message or "brackets and colons" in message


@pytest.mark.parametrize("route", BODIES)
def test_a_field_of_many_lists_is_refused_by_name(route):
    """Fields of any JSON included, such as `tool_choice` and `documents`."""
    properties = resolved(BODIES[route])["properties"]
    long = {name for name, field in properties.items() if any(o.get("maxItems", 0) > MANY for o in options(field))}
    names = [name for name in properties if name not in long]  # the others are in LISTS
    bodies = [least(BODIES[route]) | {name: [[]] * MANY} for name in names]
    for name, response in zip(names, post_all(STATE, route, bodies, headers=HEADERS), strict=True):
        assert response.status_code == 400
        assert response.json()["error"]["message"].startswith(f"{name}: "), name


def test_long_lists_that_may_be_are_decoded():
    state = state_of(StubClient(DONE), max_choices=64)
    state.engine.info = msgspec.structs.replace(state.engine.info, max_model_len=200_000)
    for prompt in ([65] * 190_000, [[65] * 1000] * 64, ["a, b: [c] " * 1000] * 64):
        response = call(state, "POST", COMPLETIONS, json={"prompt": prompt, "max_tokens": 1, "user": "unknown"})
        assert response.status_code == 200, response.text[:500]
    assert len(state.engine.submitted[0].prompt) == 4 * 190_000


def test_the_allowed_ids_of_all_sequences_are_bounded():
    state = state_of(StubClient(DONE))
    call(state, "POST", COMPLETIONS, json={"prompt": "a", "max_tokens": 1, "allowed_token_ids": [9, 8, 9]})
    assert state.engine.submitted[0].sampling.allowed_token_ids == (9, 8)
    vocab_size = state.engine.info.vocab_size
    body = {"prompt": "a", "max_tokens": 1, "allowed_token_ids": [*range(vocab_size)] * 2}
    message = call(state, "POST", COMPLETIONS, json=body).json()["error"]["message"]
    assert message.startswith(f"allowed_token_ids: at most {vocab_size} are allowed")
    state.engine.info = msgspec.structs.replace(state.engine.info, vocab_size=100_000)
    body |= {"allowed_token_ids": [*range(100_000)], "n": 100}
    message = call(state, "POST", COMPLETIONS, json=body).json()["error"]["message"]
    assert message == "allowed_token_ids: at most 10485 are allowed for 100 sequences"


texts = st.text(alphabet='a"\\[]{}:, \n\x7f\u20ac', max_size=8)
values = st.recursive(
    st.none() | st.integers(-(2**63), 2**63 - 1) | texts,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(texts, inner, max_size=5),
    max_leaves=30,
)


def marks(value: Any) -> int:
    inner = [*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else None
    if inner is None:
        return 0
    colons = len(inner) if isinstance(value, dict) else 0
    return 1 + colons + sum(map(marks, inner))


@given(values, st.booleans(), st.sampled_from([None, 1]), st.integers(1, 9))
def test_marks_are_counted_outside_of_texts_wherever_pieces_are_cut(value, ascii_only, indent, size):
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_body, "PIECE_BYTES", size)
        assert count_marks(text, 10**9) == marks(value)
        assert (count_marks(text, 5) > 5) == (marks(value) > 5)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([1] * LONG_BODY + [1.5], f"prompt.{LONG_BODY}: Expected `int | str | array`, got `float`"),
        ([[1] * LONG_BODY, [[1]]], "prompt.1.0: Expected `int`, got `array`"),
        ([1] * LONG_BODY + [{}], f"prompt.{LONG_BODY}: Expected `int | str | array`, got `object`"),
    ],
)
def test_wrong_entries_of_long_lists_are_told(prompt, message):
    assert refused(COMPLETIONS, {"prompt": prompt}) == message
