"""/v1/conversations, and responses that continue a conversation."""

from __future__ import annotations

import openai
import pytest
from openai.types.conversations import Conversation as OfficialConversation
from openai.types.conversations import ConversationItemList
from openai.types.responses import Response

from tests.server.support.echo_engine import EchoConfig
from tests.server.support.requests import load, wait_until
from tests.server.support.running import server_of
from tests.server.support.sse_events import parse_named_events
from tests.server.support.stub_app import DONE, StubClient, post_all, state_of
from tests.server.support.tokenizers import TOOL_TEMPLATE

PATH = "/v1/conversations"
RESPONSES = "/v1/responses"
ARGUMENTS = '{"city": "Bonn"}'
SCRIPTS = ["Fine.", f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}']
CALLING = {"seed": 1}
WEATHER = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}
HELLO = {"role": "user", "content": "hello"}

server = server_of(
    EchoConfig(reply=(), replies=tuple(tuple(text.encode()) for text in SCRIPTS)),
    template=TOOL_TEMPLATE,
    api_keys=("one", "two"),
)


@pytest.fixture
def http(server):
    with server.http(headers={"Authorization": "Bearer one"}) as client:
        yield client


def begun(http, **fields) -> str:
    answer = http.post(PATH, json=fields)
    assert answer.status_code == 200, answer.text
    OfficialConversation.model_validate(answer.json(), strict=True)
    return answer.json()["id"]


def items_of(http, id: str, **query):
    answer = http.get(f"{PATH}/{id}/items", params={"order": "asc", **query})
    assert answer.status_code == 200, answer.text
    ConversationItemList.model_validate(answer.json(), strict=bool(answer.json()["data"]))
    return answer.json()["data"]


def responded(http, **fields):
    answer = http.post(RESPONSES, json={"input": "and?", "seed": 0, **fields})
    assert answer.status_code == 200, answer.text
    Response.model_validate(answer.json(), strict=True)
    return answer.json()


def shape(items):
    """What they say, without ids."""
    return [
        (item["role"], "".join(part["text"] for part in item["content"]))
        if item["type"] == "message"
        else (item["type"], item.get("arguments", item.get("output")))
        for item in items
    ]


def test_the_official_client(server):
    client = server.client(api_key="one")
    made = client.conversations.create(items=[HELLO, {"role": "assistant", "content": "Hi."}], metadata={"a": "b"})
    assert client.conversations.retrieve(made.id) == made
    assert made.metadata == {"a": "b"}
    assert client.conversations.update(made.id, metadata={"c": "d"}).metadata == {"c": "d"}
    assert client.conversations.retrieve(made.id).metadata == {"c": "d"}
    added = client.conversations.items.create(made.id, items=[{"role": "user", "content": "bye"}])
    (last,) = added.data
    newest = client.conversations.items.list(made.id)
    assert [item.content[0].text for item in newest.data] == ["bye", "Hi.", "hello"]
    assert [item.content[0].type for item in newest.data] == ["input_text", "output_text", "input_text"]
    assert newest.data[0] == last == client.conversations.items.retrieve(last.id, conversation_id=made.id)
    pages = list(client.conversations.items.list(made.id, order="asc", limit=1))
    assert pages == newest.data[::-1]
    assert client.conversations.items.delete(last.id, conversation_id=made.id).id == made.id
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.retrieve(last.id, conversation_id=made.id)
    response = client.responses.create(model="test-model", input="more", conversation=made.id, extra_body={"seed": 0})
    assert (response.conversation.id, response.output_text) == (made.id, "Fine.")
    assert len(client.conversations.items.list(made.id).data) == 4
    assert client.conversations.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(made.id)
    assert client.responses.retrieve(response.id) == response


@pytest.mark.parametrize("way", ["whole", "stream", "background"])
def test_a_response_continues_a_conversation_and_adds_to_it(http, way):
    id = begun(http, items=[HELLO])
    fields = {"conversation": {"id": id}, "tools": [WEATHER], "input": "weather?", **CALLING}
    if way == "stream":
        events = parse_named_events(http.post(RESPONSES, json=fields | {"stream": True}).text)
        first = events[-1]["response"]
    else:
        first = responded(http, background=way == "background", **fields)
        wait_until(lambda: http.get(f"{RESPONSES}/{first['id']}").json()["status"] == "completed")
        first = http.get(f"{RESPONSES}/{first['id']}").json()
    assert first["conversation"] == {"id": id}
    items = items_of(http, id)
    assert shape(items) == [("user", "hello"), ("user", "weather?"), ("function_call", ARGUMENTS)]
    assert items[2] == first["output"][0]
    result = {"type": "function_call_output", "call_id": items[2]["call_id"], "output": "rain"}
    second = responded(http, conversation=id, input=[result], tools=[WEATHER])
    assert shape(items_of(http, id))[3:] == [("function_call_output", "rain"), ("assistant", "Fine.")]
    apart = [HELLO, {"role": "user", "content": "weather?"}, *first["output"], result]
    assert responded(http, input=apart, tools=[WEATHER])["usage"]["input_tokens"] == second["usage"]["input_tokens"]
    counted = http.post(f"{RESPONSES}/input_tokens", json={"conversation": id, "input": "x", "tools": [WEATHER]}).json()
    third = responded(http, conversation=id, input="x", tools=[WEATHER], store=False)
    assert third["usage"]["input_tokens"] == counted["input_tokens"] > second["usage"]["input_tokens"]
    assert len(items_of(http, id)) == 7


def test_calls_next_to_each_other_are_one_message(http):
    calls = [{"type": "function_call", "call_id": id, "name": "get_weather", "arguments": "{}"} for id in "ab"]
    results = [{"type": "function_call_output", "call_id": id, "output": "rain"} for id in "ab"]
    id = begun(http, items=[HELLO, *calls])
    http.post(f"{PATH}/{id}/items", json={"items": results})
    in_one = responded(http, input=[HELLO, *calls, *results, HELLO], tools=[WEATHER])
    for _ in range(2):
        apart = responded(http, conversation=id, input=[HELLO], tools=[WEATHER])
        assert apart["usage"]["input_tokens"] == in_one["usage"]["input_tokens"]
        for item in items_of(http, id)[-2:]:
            assert http.delete(f"{PATH}/{id}/items/{item['id']}").status_code == 200


def test_a_response_that_does_not_complete_adds_nothing(slow):
    with slow.http() as http:
        id = begun(http, items=[HELLO])
        body = {"input": "x", "conversation": id, "background": True, "ignore_eos": True}
        made = http.post(RESPONSES, json=body).json()
        assert http.post(f"{RESPONSES}/{made['id']}/cancel").json()["status"] == "cancelled"
        wait_until(lambda: load(slow) == 0)
        assert len(items_of(http, id)) == 1
        made = http.post(RESPONSES, json=body | {"max_output_tokens": 3}).json()
        http.delete(f"{PATH}/{id}")
        wait_until(lambda: http.get(f"{RESPONSES}/{made['id']}").json()["status"] == "incomplete")
        assert http.get(f"{PATH}/{id}").status_code == 404


def test_a_conversation_belongs_to_the_key_that_made_it(server, http):
    id = begun(http, items=[HELLO])
    (item,) = items_of(http, id)
    with server.http(headers={"Authorization": "Bearer two"}) as other:
        for method, path, body in (
            ("GET", "", None),
            ("POST", "", {"metadata": {}}),
            ("DELETE", "", None),
            ("GET", "/items", None),
            ("POST", "/items", {"items": [HELLO]}),
            ("GET", f"/items/{item['id']}", None),
            ("DELETE", f"/items/{item['id']}", None),
        ):
            answer = other.request(method, f"{PATH}/{id}{path}", json=body)
            assert answer.status_code == 404, (method, path)
            assert answer.text == other.request(method, f"{PATH}/conv_0{path}", json=body).text.replace("conv_0", id)
        refused = other.post(RESPONSES, json={"input": "x", "conversation": id})
        assert (refused.status_code, refused.json()["error"]["param"]) == (404, "conversation")
    assert items_of(http, id) == [item]


def test_what_cannot_be_meant_is_refused_by_name(http):
    id = begun(http)
    response = responded(http, conversation=id)
    one = f"{PATH}/{id}"
    many = {str(i): "" for i in range(17)}
    both = {"input": "x", "conversation": id, "previous_response_id": response["id"]}
    for path, body, param in (
        (RESPONSES, both, "previous_response_id"),
        (f"{RESPONSES}/input_tokens", both, "previous_response_id"),
        (RESPONSES, {"input": "x", "conversation": 5}, "conversation"),
        (RESPONSES, {"input": "x", "conversation": {}}, "conversation.id"),
        (PATH, {"metadata": many}, "metadata"),
        (PATH, {"items": [{"role": "user", "content": [{"type": "input_image"}]}]}, "items.0.content.0"),
        (PATH, {"items": [{"content": "a"}]}, "items.0.role"),
        (one, {"metadata": many}, "metadata"),
        (one, {}, "metadata"),
        (f"{one}/items", {}, "items"),
        (f"{one}/items", {"items": [HELLO] * 10_001}, "items"),
        (f"{one}/items?include=file_search_call.results", {"items": [HELLO]}, "include"),
    ):
        refused = http.post(path, json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), (path, body)
    assert shape(items_of(http, id)) == [("user", "and?"), ("assistant", "Fine.")]
    for query in ({"limit": 0}, {"order": "up"}, {"after": "item_0"}, {"include": "x"}):
        assert http.get(f"{one}/items", params=query).json()["error"]["param"] == next(iter(query))
    assert http.post(RESPONSES, json={"input": "x", "conversation": response["id"]}).status_code == 404


def test_an_empty_conversation_is_one(http):
    id = begun(http, items=None, metadata=None)
    page = http.get(f"{PATH}/{id}/items").json()
    assert page == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
    assert responded(http, conversation=id)["usage"] == responded(http)["usage"]


def test_a_strict_server_refuses_fields_that_it_does_not_know():
    cases = [
        (PATH, {"itemz": []}, "itemz"),
        (PATH, {"items": [HELLO | {"idd": "x"}]}, "items.0.idd"),
        (f"{PATH}/conv_0", {"metadata": {}, "a": 1}, "a"),
        (f"{PATH}/conv_0/items", {"items": [], "a": 1}, "a"),
        (RESPONSES, {"input": "x", "conversation": {"id": "x", "a": 1}}, "conversation.a"),
    ]
    for path, body, param in cases:
        for strict in (True, False):
            (answer,) = post_all(state_of(StubClient(DONE), strict_fields=strict), path, [body])
            if strict:
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
            else:
                assert answer.status_code in (200, 404)
