"""Items of an input that name kept items by their ids."""

from __future__ import annotations

import pytest

from tests.server.support.echo_engine import EchoConfig
from tests.server.support.requests import wait_until
from tests.server.support.running import server_of
from tests.server.support.tokenizers import TOOL_TEMPLATE

PATH = "/v1/responses"
CONVERSATIONS = "/v1/conversations"
CALL = '{"name": "get_weather", "parameters": {"city": "Bonn"}}'
WEATHER = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}
WORDS = {"role": "user", "content": [{"type": "input_text", "text": "What is it like?"}]}

server = server_of(
    EchoConfig(reply=(), replies=(tuple(b"Fine."), tuple(CALL.encode()))),
    template=TOOL_TEMPLATE,
    api_keys=("one", "two"),
)


@pytest.fixture
def http(server):
    with server.http(headers={"Authorization": "Bearer one"}) as client:
        yield client


def reference(id: str):
    return {"type": "item_reference", "id": id}


def responded(http, **fields):
    answer = http.post(PATH, json={"input": [WORDS], "seed": 0, "tools": [WEATHER], **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def num_tokens(http, *items) -> int:
    answer = http.post(f"{PATH}/input_tokens", json={"input": items, "tools": [WEATHER]})
    assert answer.status_code == 200, answer.text
    return answer.json()["input_tokens"]


def listed(http, path: str):
    return http.get(path, params={"order": "asc"}).json()["data"]


def test_items_of_a_response_are_named(http):
    made = responded(http, seed=1)
    (words,) = listed(http, f"{PATH}/{made['id']}/input_items")
    (call,) = made["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
    whole = num_tokens(http, WORDS, call, result)
    assert whole == num_tokens(http, reference(words["id"]), reference(call["id"]), result)
    assert whole == num_tokens(http, {"id": words["id"]}, {"id": call["id"]}, result)
    assert whole > num_tokens(http, reference(words["id"])) == num_tokens(http, WORDS)
    twice = num_tokens(http, *[reference(words["id"])] * 2)
    assert twice == num_tokens(http, WORDS, WORDS)
    following = responded(http, input=[reference(words["id"]), call, result])
    assert [item["type"] for item in listed(http, f"{PATH}/{following['id']}/input_items")] == [
        *("message", "function_call", "function_call_output")
    ]


def test_items_of_a_conversation_are_named(http):
    first, second = (http.post(CONVERSATIONS, json={"items": [WORDS]}).json()["id"] for _ in range(2))
    (words,) = listed(http, f"{CONVERSATIONS}/{first}/items")
    made = responded(http, conversation=first)
    assert num_tokens(http, WORDS, made["output"][0]) == num_tokens(
        http, reference(words["id"]), reference(made["output"][0]["id"])
    )
    added = http.post(f"{CONVERSATIONS}/{second}/items", json={"items": [reference(words["id"])]}).json()["data"]
    assert [item["content"] for item in added] == [words["content"]]
    third = http.post(CONVERSATIONS, json={"items": [reference(made["output"][0]["id"])]}).json()["id"]
    (copy,) = listed(http, f"{CONVERSATIONS}/{third}/items")
    assert copy["content"] == made["output"][0]["content"]
    assert len({words["id"], added[0]["id"], copy["id"], made["output"][0]["id"]}) == 4


def test_an_output_is_found_as_long_as_its_response_or_its_conversation_is_kept(http):
    for kept in ("response", "conversation"):
        conversation = http.post(CONVERSATIONS, json={}).json()["id"]
        made = responded(http, conversation=conversation)
        output = reference(made["output"][0]["id"])
        paths = {"response": f"{PATH}/{made['id']}", "conversation": f"{CONVERSATIONS}/{conversation}"}
        other = paths.pop("conversation" if kept == "response" else "response")
        assert http.delete(other).status_code == 200
        assert num_tokens(http, WORDS, output) == num_tokens(http, WORDS, made["output"][0])
        assert http.delete(paths[kept]).status_code == 200
        assert http.post(PATH, json={"input": [WORDS, output]}).status_code == 404


def test_an_item_that_is_not_kept_is_not_found(server, http):
    made = responded(http)
    unkept = responded(http, store=False)
    conversation = http.post(CONVERSATIONS, json={"items": [WORDS, WORDS]}).json()["id"]
    left, removed = listed(http, f"{CONVERSATIONS}/{conversation}/items")
    http.delete(f"{CONVERSATIONS}/{conversation}/items/{removed['id']}")
    stem = made["id"].removeprefix("resp-")
    unknown = ["msg_none", "", "_", f"item_{stem}_1", f"msg_{stem}_7", unkept["output"][0]["id"], removed["id"]]
    for id in (*unknown, made["id"], conversation):
        for path, body, param in (
            (PATH, {"input": [WORDS, reference(id)]}, "input.1.id"),
            (f"{PATH}/input_tokens", {"input": [WORDS, reference(id)]}, "input.1.id"),
            (CONVERSATIONS, {"items": [reference(id)]}, "items.0.id"),
            (f"{CONVERSATIONS}/{conversation}/items", {"items": [reference(id)]}, "items.0.id"),
        ):
            answer = http.post(path, json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (404, param), (path, id)
    refused = http.post(PATH, json={"input": [{"type": "item_reference"}]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input.0.id")
    assert num_tokens(http, reference(left["id"])) == num_tokens(http, WORDS)
    with server.http(headers={"Authorization": "Bearer two"}) as other:
        for id in (made["output"][0]["id"], f"item_{stem}_0", left["id"]):
            assert other.post(PATH, json={"input": [reference(id)]}).status_code == 404


def test_an_item_of_a_response_that_is_being_made_is_not_found_yet(slow):
    with slow.http() as http:
        made = http.post(PATH, json={"input": "a", "background": True, "ignore_eos": True}).json()
        path = f"{PATH}/{made['id']}"
        wait_until(lambda: http.get(path).json()["status"] == "in_progress")
        words = listed(http, f"{path}/input_items")[0]["id"]
        assert http.post(PATH, json={"input": [reference(words)]}).status_code == 404
        assert http.post(f"{path}/cancel").status_code == 200
        answer = http.post(f"{PATH}/input_tokens", json={"input": [reference(words)]})
        assert answer.json() == http.post(f"{PATH}/input_tokens", json={"input": "a"}).json()
