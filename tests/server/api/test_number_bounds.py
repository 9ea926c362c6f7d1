"""No number of a body is an error of the server, however large. The numbers come from /openapi.json, so that a new
field cannot be forgotten. A real engine's process gets those that are not refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from batcher.request import Pooling
from tests.server.api.test_list_bounds import BODIES, Places, Schema, least, options, resolved
from tests.server.support.real_engine import RealConfig
from tests.server.support.running import server_of

pytestmark = pytest.mark.slow

NUMBERS = [2**63, 2**64, 10**30, -(2**63) - 1, -(10**30), 1e308]
HELLO = [{"role": "user", "content": "a"}]
# Bodies that are answered, where the least one of the schema is not.
ENOUGH = {
    "/inference/v1/generate": {"token_ids": [1]},
    "/update_weights": {
        "update_info": {"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]], "shared_memory": "none"}
    },
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/chat/completions/batch": {"messages": [HELLO]},
    "/v1/completions": {"prompt": "a"},
    **{route: {"input": "a"} for route in ("/v1/embeddings", "/pooling")},
    **{route: {"query": "a", "documents": ["a"]} for route in ("/rerank", "/v1/rerank", "/v2/rerank")},
    **{route: {"text_1": "a", "text_2": "a"} for route in ("/score", "/v1/score")},
    "/v1/messages": {"messages": HELLO},
    "/v1/responses": {"input": "a"},
    "/v1/responses/input_tokens": {"input": "a"},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
}


def numbers(schema: Schema, seen: tuple[str, ...] = ()) -> Iterator[Places]:
    """The places of numbers: names, and "0" for the entry of a list."""
    for option in options(schema):
        if option.get("$ref") in seen:
            continue
        within, kind = (*seen, option.get("$ref", "")), resolved(option)
        if kind.get("type") in ("integer", "number"):
            yield ()
        for name, inner in kind.get("properties", {}).items():
            yield from ((name, *path) for path in numbers(inner, within))
        for inner in (kind.get("items"), kind.get("additionalProperties")):
            if isinstance(inner, dict):
                yield from (("0", *path) for path in numbers(inner, within))


PLACES = sorted({(route, path) for route, schema in BODIES.items() for path in numbers(schema)})
server = server_of(
    RealConfig(pooling=Pooling.LAST),
    target="tests.server.support.real_engine:build",
    strict_fields=True,
)


def with_number(schema: Schema, body: object, path: Places, number: float) -> object:
    """`body`, with the number at this place."""
    if not path:
        return number
    name, *rest = path
    for kind in map(resolved, options(schema)):
        fields = kind.get("properties", {})
        if name in fields:
            before = body if isinstance(body, dict) else least(kind)
            return before | {name: with_number(fields[name], before.get(name), tuple(rest), number)}
        inner = kind.get("items", kind.get("additionalProperties"))
        if name == "0" and isinstance(inner, dict) and any(True for _ in numbers(inner)):
            value = with_number(inner, body[0] if isinstance(body, list) and body else None, tuple(rest), number)
            return [value] if "items" in kind else {"0": value}
    raise KeyError(path)


def test_the_table_has_the_numbers_that_are_known():
    assert set(PLACES) >= {
        ("/update_weights", ("update_info", "shapes", "0", "0")),
        ("/v1/chat/completions", ("logit_bias", "0")),
        ("/v1/completions", ("prompt", "0", "0")),
        ("/v1/messages", ("thinking", "budget_tokens")),
        ("/v1/responses", ("max_output_tokens",)),
    }


def test_the_bodies_are_answered_without_such_a_number(server):
    for route in ENOUGH.keys() - {"/update_weights"}:  # this engine refuses all of them
        answer = server.post(route, least(BODIES[route]) | ENOUGH[route])
        assert answer.status_code == 200, (route, answer.text)


@pytest.mark.parametrize(("route", "path"), PLACES, ids=[f"{route}:{'.'.join(path)}" for route, path in PLACES])
def test_a_number_of_any_size_is_no_error_of_the_server(server, route, path):
    schema = BODIES[route]
    with server.http(headers={"Authorization": f"Bearer {server.admin_key}"}) as http:
        for number in NUMBERS:
            before = least(schema) | ENOUGH.get(route, {})
            answer = http.post(route, json=with_number(schema, before, path, number))
            assert answer.status_code in (200, 400, 404, 409, 501), (number, answer.text)
        assert http.get("/health").status_code == 200
